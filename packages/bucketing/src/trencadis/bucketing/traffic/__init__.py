"""Observed traffic: traces of requests, and a recorder of the shapes of batches."""

from trencadis.bucketing.traffic.recorder import TrafficRecorder
from trencadis.bucketing.traffic.trace import Trace, read_trace

__all__ = [
    "Trace",
    "TrafficRecorder",
    "read_trace",
]
