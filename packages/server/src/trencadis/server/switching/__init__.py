"""Switches between the models of one engine: by an administrator, and by requests."""
