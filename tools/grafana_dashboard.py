"""The Grafana dashboard of engine-serve, ``deploy/grafana/dashboard.json``, made from `ROWS`.

``python tools/grafana_dashboard.py`` prints it, ``--write`` writes the file. A test compares the
two, and asks a real server for every metric and label that the queries name.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).parent.parent / "deploy" / "grafana" / "dashboard.json"

SELECTED = '{instance=~"$instance", model_name=~"$model_name"}'
"""The label matchers of metrics of a model; ``$S`` in `ROWS`."""

SELECTED_DEVICES = '{instance=~"$instance"}'
"""Those of metrics of the device or the engine, whichever model is active; ``$D`` in `ROWS`."""

WIDTH, HEIGHT = 24, 8
"""Of a row and of a panel, in units of Grafana's grid."""


class Panel(NamedTuple):
    """A graph. ``queries``: pairs of PromQL and legend. ``unit`` is Grafana's name of it."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    description: str = ""


def _quantiles(metric: str) -> tuple[tuple[str, str], ...]:
    return tuple(
        (
            f"histogram_quantile({quantile}, "
            f"sum by (le) (rate({metric}_bucket$S[$__rate_interval])))",
            f"p{100 * quantile:.0f}",
        )
        for quantile in (0.5, 0.9, 0.99)
    )


def _rate(metric: str, selected: str = "$S") -> str:
    return f"sum(rate({metric}{selected}[$__rate_interval]))"


ROWS: dict[str, tuple[Panel, ...]] = {
    "Requests": (
        Panel(
            "Requests by state",
            "short",
            (
                ("sum(vllm:num_requests_running$S)", "running"),
                ("sum(vllm:num_requests_waiting$S)", "waiting"),
                ("sum(vllm:num_requests_swapped$S)", "swapped"),
                ("sum(trencadis:num_requests_preempted$S)", "preempted"),
            ),
        ),
        Panel(
            "Tokens per second",
            "short",
            (
                (_rate("vllm:generation_tokens_total"), "generated"),
                (_rate("trencadis:prefill_tokens_total"), "prefill"),
                (_rate("trencadis:padded_tokens_total"), "padding"),
            ),
        ),
        Panel(
            "Finished choices per second",
            "short",
            (
                (
                    "sum by (finished_reason) "
                    "(rate(vllm:request_success_total$S[$__rate_interval]))",
                    "{{finished_reason}}",
                ),
            ),
        ),
    ),
    "Latency": (
        Panel("Time to first token", "s", _quantiles("vllm:time_to_first_token_seconds")),
        Panel("Time between tokens", "s", _quantiles("vllm:inter_token_latency_seconds")),
        Panel(
            "p99 time to first token by what happened before it",
            "s",
            (
                (
                    "histogram_quantile(0.99, sum by (le, request_status) "
                    "(rate(vllm:time_to_first_token_seconds_bucket$S[$__rate_interval])))",
                    "{{request_status}}",
                ),
            ),
            "What preemption and swaps cost the requests that they hit.",
        ),
        Panel(
            "Time of a request's phases, p90",
            "s",
            tuple(
                (
                    "histogram_quantile(0.9, sum by (le) "
                    f"(rate(vllm:request_{phase}_time_seconds_bucket$S[$__rate_interval])))",
                    phase,
                )
                for phase in ("queue", "prefill", "decode")
            ),
        ),
    ),
    "Heat": (
        Panel(
            "Temperature",
            "celsius",
            (
                ("max by (instance) (trencadis:temperature_celsius$D)", "{{instance}}"),
                ("max by (instance) (trencadis:thermal_target_celsius$D)", "{{instance}} target"),
            ),
        ),
        Panel(
            "Running sequences and their limit",
            "short",
            (
                ("sum by (instance) (trencadis:running_seqs$S)", "{{instance}} running"),
                ("sum by (instance) (trencadis:max_running_seqs$S)", "{{instance}} limit"),
            ),
            "The limit is lowered by thermal policies and operators.",
        ),
        Panel(
            "Power",
            "watt",
            (
                ("sum by (instance) (trencadis:power_watts$D)", "{{instance}}"),
                (
                    "sum(trencadis:power_watts$D) / (sum(trencadis:running_seqs$S) > 0)",
                    "per running sequence",
                ),
            ),
        ),
        Panel(
            "Prefill limit",
            "short",
            (("min by (instance) (trencadis:prefill_token_limit$S)", "{{instance}}"),),
            "Most prompt tokens of a step.",
        ),
        Panel(
            "Sensors and policy",
            "short",
            (
                ("max by (instance) (trencadis:sensor_health$D)", "{{instance}} sensor"),
                (_rate("trencadis:thermal_policy_faults_total", "$D"), "policy faults/s"),
                (_rate("trencadis:thermal_readings_rejected_total", "$D"), "rejected readings/s"),
            ),
            "Sensor: 0 current, 1 stale, 2 failed.",
        ),
    ),
    "KV cache": (
        Panel(
            "Blocks in use",
            "percentunit",
            (("max by (instance) (vllm:kv_cache_usage_perc$S)", "{{instance}}"),),
        ),
        Panel(
            "Prefix hits",
            "percentunit",
            (
                (
                    f"{_rate('vllm:prefix_cache_hits_total')} "
                    f"/ ({_rate('vllm:prefix_cache_queries_total')} > 0)",
                    "share of prompt tokens",
                ),
            ),
        ),
        Panel(
            "Fragmentation",
            "percentunit",
            (
                (
                    "1 - sum(trencadis:kv_blocks_used$S) "
                    "/ (sum(trencadis:highest_block_in_use$S) > 0)",
                    "free blocks below the highest in use",
                ),
            ),
            "Decode reads the cache up to the highest block in use.",
        ),
        Panel(
            "Defragmented blocks per second",
            "short",
            ((_rate("trencadis:defragmented_blocks_total"), "moved"),),
        ),
        Panel(
            "Preemptions per second",
            "short",
            (
                (_rate("trencadis:swaps_total"), "swapped out"),
                (_rate("trencadis:recomputes_total"), "to be recomputed"),
            ),
        ),
        Panel(
            "Swapped bytes per second",
            "Bps",
            (
                (_rate("trencadis:swap_out_bytes_total"), "out"),
                (_rate("trencadis:swap_in_bytes_total"), "in"),
            ),
        ),
        Panel(
            "Blocks that wait to be swapped",
            "short",
            (("sum(trencadis:swap_queue_blocks$S)", "blocks"),),
            "Because of --swap-bandwidth.",
        ),
    ),
    "Buckets": (
        Panel(
            "Warm-up",
            "percentunit",
            (
                (
                    "sum(trencadis:ready_buckets$S) / (sum(trencadis:buckets$S) > 0)",
                    "warm buckets",
                ),
            ),
        ),
        Panel(
            "Misses and compilations per second",
            "short",
            (
                (_rate("trencadis:bucket_misses_total"), "bucket misses"),
                (_rate("trencadis:cold_forwards_total"), "cold forward passes"),
                (_rate("trencadis:compilations_total"), "compilations"),
            ),
        ),
        Panel(
            "Steps per second, and restarts of the core",
            "short",
            (
                (_rate("trencadis:engine_steps_total"), "steps"),
                ("sum(increase(trencadis:core_restarts_total$D[1h]))", "restarts in an hour"),
            ),
        ),
    ),
    "Models": (
        Panel(
            "Active model",
            "short",
            (
                (
                    "max by (instance, model_name) (trencadis:model_active$S)",
                    "{{instance}} {{model_name}}",
                ),
            ),
        ),
        Panel(
            "Switches per second",
            "short",
            (
                (_rate("trencadis:model_switches_total"), "succeeded"),
                (_rate("trencadis:model_switch_failures_total"), "failed"),
            ),
        ),
        Panel("Time of a switch", "s", _quantiles("trencadis:model_switch_seconds")),
        Panel(
            "Requests that wait for a switch",
            "short",
            (
                (
                    "sum by (model_name) (trencadis:num_requests_waiting_for_switch$S)",
                    "{{model_name}}",
                ),
            ),
        ),
        Panel(
            "Silence of the core",
            "s",
            (
                ("max by (instance) (trencadis:core_silence_seconds$D)", "{{instance}}"),
                ("max by (instance) (trencadis:core_silence_limit_seconds$D)", "limit"),
            ),
            "A core is silent while it loads or compiles, up to its limit, and where it hangs.",
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        grid = {"x": 0, "y": y, "w": WIDTH, "h": 1}
        panels.append({"type": "row", "title": title, "collapsed": False, "gridPos": grid})
        y += 1
        width = WIDTH // min(3, len(row))
        for number, panel in enumerate(row):
            x = number % 3 * width
            grid = {"x": x, "y": y + number // 3 * HEIGHT, "w": width, "h": HEIGHT}
            panels.append(_graph(panel, grid))
        y += -(-len(row) // 3) * HEIGHT
    for number, content in enumerate(panels, 1):
        content["id"] = number
    return {
        "title": "engine-serve",
        "uid": "engine-serve",
        "tags": ["llm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Prometheus",
                    "type": "datasource",
                    "query": "prometheus",
                },
                _variable("instance"),
                _variable("model_name"),
            ]
        },
        "panels": panels,
    }


def _graph(panel: Panel, grid: dict[str, int]) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + i), "expr": _selected(query), "legendFormat": legend}
        for i, (query, legend) in enumerate(panel.queries)
    ]
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": {"type": "prometheus", "uid": "$datasource"},
        "gridPos": grid,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": targets,
    }


def _selected(query: str) -> str:
    return query.replace("$S", SELECTED).replace("$D", SELECTED_DEVICES)


def _variable(label: str) -> dict[str, Any]:
    query = f"label_values(vllm:num_requests_running, {label})"
    return {
        "name": label,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "$datasource"},
        "definition": query,
        "query": {"query": query, "refId": label},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def text() -> str:
    """The content of `FILE`."""
    return json.dumps(dashboard(), indent=2) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    if parser.parse_args().write:
        FILE.write_text(text())
    else:
        print(text(), end="")


if __name__ == "__main__":
    main()
