"""Modules that the bridge generates."""
