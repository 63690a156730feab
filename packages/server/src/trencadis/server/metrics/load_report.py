"""The load of the engine in a header of its responses, by which a proxy chooses a server (ORCA).

Names and forms are vLLM's. The report is that of https://github.com/cncf/xds,
xds/data/orca/v3/orca_load_report.proto.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from trencadis.engine import EngineStats

WANTED_FORMAT = "endpoint-load-metrics-format"
LOAD_REPORT = "endpoint-load-metrics"


def load_headers(headers: Mapping[str, str], stats: EngineStats) -> dict[str, str]:
    """The header that a request asks for with `WANTED_FORMAT`, ``TEXT`` or ``JSON``.

    None for another format: a wish about the load must not make a request fail.
    """
    wanted = headers.get(WANTED_FORMAT, "").upper()
    loads = {
        "kv_cache_usage_perc": float(stats.cache_usage),
        "num_requests_waiting": float(stats.num_waiting_reqs),
    }
    if wanted == "JSON":
        return {LOAD_REPORT: f"JSON {json.dumps({'named_metrics': loads})}"}
    if wanted == "TEXT":
        named = ", ".join(f"named_metrics.{name}={value}" for name, value in loads.items())
        return {LOAD_REPORT: f"TEXT {named}"}
    return {}
