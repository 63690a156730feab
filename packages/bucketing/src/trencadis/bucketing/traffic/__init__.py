"""Observed traffic: traces of requests, and a recorder of the shapes of batches."""

from trencadis.bucketing.traffic.batches import split_to_limits
from trencadis.bucketing.traffic.recorder import TrafficRecorder
from trencadis.bucketing.traffic.trace import LENGTH_COLUMNS, Trace, read_trace

__all__ = [
    "LENGTH_COLUMNS",
    "Trace",
    "TrafficRecorder",
    "read_trace",
    "split_to_limits",
]
