"""The page ``/dashboard``: its files, and the snapshots that it shows."""
