"""How the house is drawn: data that ``test_house.py`` holds the packages to.

Change the drawing here, with the change that it allows. ``python tools/structure.py`` prints the
floors that the imports have today.
"""

from __future__ import annotations

ALLOWED: dict[str, set[str]] = {
    "bucketing": set(),
    "kvcache": set(),
    "warmup": {"bucketing"},
    "scheduler": {"kvcache"},
    "engine": {"bucketing", "kvcache", "warmup", "scheduler"},
    "server": {"engine"},
}
"""The packages, and which others each may import; docs/architecture.md draws it. The engine uses
values of the lowest packages (buckets, block copies, the cache's tensors), which warmup and
scheduler pass through it."""

APART = {"kvcache.tensors", "scheduler.thermal", "scheduler.telemetry"}
"""Public although not in their package's ``__init__``: not every user of the package needs them."""

LIGHT = {
    "bucketing": {"attrs", "numpy"},
    "kvcache": {"attrs", "numpy"},
    "warmup": {"attrs", "numpy"},
    "scheduler": {"attrs", "numpy"},
}
"""Third-party packages that the four small libraries may load when they are imported."""

OPTIONAL = {
    "bucketing.plot": {"matplotlib"},
    "kvcache.tensors": {"torch"},
    "kvcache.copiers": {"torch"},
    "kvcache.memory": {"torch"},
    "scheduler.telemetry.sidecar": {"grpc", "google"},
}
"""Modules that need an extra, and what it brings; no other module of the package loads them."""

VAGUE_NAMES = {"checks", "data", "memory", "process", "utils"}
"""Names that say too little for a module or a subpackage."""

CEILING_DIVISION = "rounding"
"""The module of a package in which ceiling division is written; its other modules call it."""

UNDRAWN_ROOMS = 6
"""A subpackage with more rooms needs a drawing of its own below."""

FLOORS: dict[str, list[set[str]]] = {
    "bucketing": [
        {"errors"},
        {"bucket", "bucket_file", "cells", "config", "fitted", "ranges"},
        {"axis_plan", "comparison", "grid", "reach", "trace", "traffic"},
        {"fit_plans", "plot"},
        {"serving_grids"},
        {"cli"},
    ],
    "kvcache": [
        {"errors"},
        {"bandwidth", "block_table", "config", "id_set", "layers", "memory", "moves", "prefix"},
        {"copiers", "decode_layout", "reuse", "sequence"},
        {"block_pool", "swap_space", "tensors"},
        {"device_blocks", "prefix_cache"},
        {"swapper"},
        {"manager"},
        {"defrag"},
    ],
    "warmup": [
        {"errors"},
        {"checks", "lines", "prediction", "progress", "runtime", "sampler", "strategies"},
        {"config", "memory", "report", "usage"},
        {"timing"},
        {"background", "capture"},
        {"session"},
    ],
    "scheduler": [
        {"clock", "errors"},
        {"validators"},
        {"config", "request", "telemetry"},
        {"beams"},
        {"group"},
        {"group_blocks", "group_states", "output", "thermal"},
        {"admission", "preemption_costs", "step_results"},
        {"preemption"},
        {"running_limit"},
        {"control"},
        {"scheduler"},
    ],
    "scheduler.telemetry": [
        {"config", "errors", "exporter_metrics"},
        {"source"},
        {
            "device_library",
            "exporter",
            "plausibility",
            "recorded",
            "regenerate",
            "registry",
            "sensors",
        },
        {"hlml", "nvml", "sidecar", "temperature_state"},
        {"reader"},
    ],
    "scheduler.telemetry.sidecar": [
        {"backoff", "generated", "tls"},
        {"config", "wire"},
        {"client", "feed"},
        {"server"},
        {"cli"},
        {"__main__"},
    ],
    "scheduler.thermal": [
        {"heat_model", "policy", "power_model", "victims"},
        {"guard", "no_policy", "power_budget", "proportional", "registry"},
    ],
    "engine": [
        {"errors"},
        {"validators"},
        {"outputs", "sampling_params", "settings"},
        {"config"},
        {"models"},
        {"devices"},
        {"ipc", "runner"},
        {"core", "simulated"},
        {"front"},
    ],
    "engine.devices": [
        {"device", "packed_linear", "program_store"},
        {"inductor", "recorded"},
        {"cpu", "cuda", "hpu"},
    ],
    "engine.front": [
        {"tokenizer"},
        {"core_start", "detokenizer"},
        {"sample_stream"},
        {"request_stream"},
        {"async_engine", "llm"},
    ],
    "engine.models": [
        {"gguf", "paged_context"},
        {"attention", "checkpoint", "decoder_layers", "default_model"},
        {"loader"},
    ],
    "engine.runner": [
        {"block_moves", "grids", "prompt_batches", "sampler", "shapes"},
        {"background_warmup", "model_input", "sampler_warmup"},
        {"forward_runner"},
        {"model_runner"},
        {"worker"},
    ],
    "engine.simulated": [
        {"clock", "hardware", "model_shape", "records", "workload"},
        {"config", "cost_model", "heat", "memory_model"},
        {"runtime"},
        {"runner"},
        {"simulation"},
        {"report"},
        {"plot"},
        {"cli"},
    ],
    "server": [
        {"errors", "messages", "settings", "sizes", "unsupported", "usage"},
        {"auth", "backend", "body_limit", "content_type", "flags", "protocol"},
        {"logprobs", "metrics", "prompts"},
        {"generation"},
        {"context", "event_stream"},
        {"routes"},
        {"app"},
        {"launch"},
        {"cli"},
        {"__main__"},
    ],
}
"""The floors of each package, lowest first, each a set of rooms: subfolders and modules, as in the
package's folder. A room imports only from lower floors. Subpackages are named in full."""
