"""The command `trencadis-buckets`."""

from trencadis.bucketing.cli.command_line import main

__all__ = [
    "main",
]
