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

APART = {
    "bucketing.validators",
    "engine.doctor",
    "engine.settings",
    "engine.simulated",
    "engine.validators",
    "kvcache.state_cache",
    "kvcache.tensors",
    "kvcache.validators",
    "scheduler.thermal",
    "scheduler.telemetry",
}
"""Public although not in their package's ``__init__``: not every user of the package needs them."""

LIGHT = {
    "bucketing": {"attrs", "numpy"},
    "kvcache": {"attrs", "numpy"},
    "warmup": {"attrs", "numpy"},
    "scheduler": {"attrs", "numpy"},
}
"""Third-party packages that the four small libraries may load when they are imported."""

OPTIONAL = {
    "bucketing.cli.plot": {"matplotlib"},
    "bucketing.testing": {"hypothesis"},
    "bucketing.vllm_gaudi": {"vllm_gaudi"},
    "kvcache.state_cache": {"torch"},
    "kvcache.tensors": {"torch"},
    "kvcache.copiers": {"torch"},
    "kvcache.testing": {"hypothesis"},
    "kvcache.vllm_gaudi": {"habana_frameworks", "torch", "vllm_gaudi"},
    "scheduler.telemetry.sidecar": {"grpc", "google"},
    "scheduler.testing": {"hypothesis"},
    "scheduler.sglang": {"sglang"},
    "scheduler.vllm": {"vllm"},
    "server.ray": {"ray"},
    "server.ray_front": {"ray"},
    "server.ray_router": {"ray"},
    "warmup.testing": {"hypothesis"},
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
        {"errors", "rounding"},
        {"validators"},
        {"shapes", "text_files"},
        {"grid", "traffic"},
        {"bucket_file", "strategies", "testing"},
        {"config"},
        {"serving_grids"},
        {"strategy_comparison", "vllm_gaudi"},
        {"cli", "vllm_plugin"},
    ],
    "kvcache": [
        {"block_key", "errors", "lru_bytes", "rounding", "tier"},
        {"cache_events", "copy_plan", "disk_tier", "host_tier", "testing", "validators"},
        {"config", "copiers", "state_slots", "state_snapshots"},
        {"layer_groups", "prefix_cache", "state_cache"},
        {"block_pool", "decode_layout", "tensors"},
        {"sequences"},
        {"transfers"},
        {"swapper"},
        {"defrag", "manager"},
        {"nano_vllm", "remapper", "tier_transfers"},
        {"vllm_gaudi"},
        {"vllm_plugin"},
    ],
    "warmup": [
        {"errors", "graph_cost", "log_lines", "progress_bar", "progress_log", "runtime"},
        {"testing", "validators"},
        {"memory_use", "report", "sampler", "strategies"},
        {"execution", "memory_plan"},
        {"background", "capture", "config"},
        {"session"},
    ],
    "scheduler": [
        {"errors", "testing"},
        {"validators"},
        {"clock"},
        {"config", "fair_share", "request", "telemetry"},
        {"beams"},
        {"group"},
        {"snapshot_points"},
        {"group_blocks", "group_states", "output", "thermal"},
        {"preemption_costs", "step_results"},
        {"admission"},
        {"preemption", "running_limit"},
        {"control", "limit_enforcement"},
        {"batch_limiter", "runtime_settings", "scheduler"},
        {"sglang", "vllm"},
        {"sglang_plugin"},
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
        {"heat_model", "readings", "victims"},
        {"policy"},
        {"continued_view", "phase_power", "power_model", "proportional"},
        {"guard", "no_policy", "power_budget", "registry", "two_phase"},
    ],
    "engine": [
        {"errors"},
        {"fair_thread", "line_process", "validators"},
        {"api"},
        {"models"},
        {"devices"},
        {"grammars", "ipc", "settings"},
        {"runner"},
        {"core", "simulated"},
        {"front"},
        {"doctor"},
    ],
    "engine.api": [
        {"inspection", "outputs", "scoring", "structured_output", "text_prompts"},
        {"sampling_params"},
        {"requests"},
    ],
    "engine.core": [
        {
            *("adapter_loads", "adapter_slots", "adapter_table", "config_payload", "kv_events"),
            *("prefix_tiers", "thermal_monitor"),
        },
        {"request_table"},
        {"step_sampling"},
        {"engine_core"},
        {"compile_cache", "reconfigure"},
        {"core_process"},
    ],
    "engine.doctor": [
        {"check_list", "device_counts", "finding", "predicted_step"},
        {"report", "served_engine", "software"},
        {"device_findings", "program_runs", "token_comparison"},
        {"full_warm_up", "step_findings"},
        {"check_process"},
        {"examination"},
    ],
    "engine.devices": [
        {"kernel_trial", "own_files", "processor"},
        {"device"},
        {"program_store"},
        {"inductor", "recorded"},
        {"cpu", "cuda", "hpu"},
    ],
    "engine.devices.cpu": [
        {"huge_pages", "native_kernel", "numa", "onednn_linear", "threads", "weight_tiles"},
        {"native_calls"},
        {
            *("adapter_products", "attention", "byte_linear", "rank_sums", "router_products"),
            "mamba_mixer",
        },
        {"tiled_linear"},
        {"expert_products", "recorded_layers"},
        {"device"},
    ],
    "engine.devices.hpu": [
        {"bridge", "kernels"},
        {"cached_rows", "fp8_linear", "graphs"},
        {"attention", "experts"},
        {"kernel_trials"},
        {"device"},
    ],
    "engine.grammars": [
        {"exact_numbers", "finite_schemas"},
        {"grammar"},
        {"check_process", "checker", "matcher"},
        {"compiler"},
    ],
    "engine.front": [
        {
            "chat_renderer",
            "grammar_checks",
            "interrupts",
            "pooled_results",
            "template_process",
            "yaml_nodes",
        },
        {"core_supervisor", "multi_model_config", "tokenizer"},
        {"adapter_calls", "bad_words", "detokenizer"},
        {"request_stream"},
        {"open_requests"},
        {"model_changes"},
        {"async_engine", "llm"},
        {"prepared_models"},
        {"multi_model_engine"},
    ],
    "engine.settings": [
        {"command_parser", "flags", "kv_events_config", "kv_tiers"},
        {"capacity_settings", "library_settings"},
        {"engine_config"},
    ],
    "engine.ipc": [
        {"messages"},
        {"channel"},
    ],
    "engine.models": [
        {
            "broken_files",
            "chat_templates",
            "layer_spec",
            "logit_head",
            "packed_weight",
            "pooling",
            "quantized_cache",
            "rank_modules",
            "real_rotary",
            "replaced_layers",
            "rotary",
            "state_functions",
            "weight_files",
        },
        {
            *("adapter_files", "adapter_operator", "cache_scales", "declared_modules"),
            *("gguf_blocks", "hub", "layer_inputs", "measured_scales"),
            *("packed_experts", "packed_formats"),
            "paged_context",
            *("rank_part", "score_heads"),
        },
        {
            *(
                "attention_operator",
                "calibration_files",
                "packed_gguf",
                "rank_loading",
                "rounded_weights",
            ),
            "softmax_attention",
        },
        {"recent_blocks"},
        {
            *("block_attention", "decoder_layers", "gguf", "packed_checkpoint"),
            "pair_prompts",
        },
        {
            *("adapter_layers", "attention", "checkpoint", "compiled_forward"),
            *("default_model", "state_layers"),
        },
        {"checkpoint_process", "layer_reading"},
        {"loader"},
    ],
    "engine.runner": [
        {
            "adapter_store",
            "block_moves",
            "float_bits",
            "gumbel",
            "limits",
            "recorded_traffic",
            "shapes",
            "shared_blocks",
            "sorted_chunks",
            "step",
        },
        {"executor", "grids", "host_swap", "logit_edits", "model_input", "sampling_rows"},
        {
            "background_warmup",
            "bucket_usage",
            "draw",
            "kept_programs",
            "learned_grids",
            "pooler",
            "replayed_steps",
            "sampler_warmup",
        },
        {"bisection", "device_sampler", "forward_runner", "prompt_scorer"},
        {"bucket_choice", "cache_sizing", "grid_choice", "sampler"},
        {"batch_builder"},
        {"model_runner"},
        {"worker"},
        {"in_process"},
        {"ranks"},
        {"executor_choice"},
    ],
    "engine.runner.ranks": [
        {"packed_steps", "step_board", "unsupported"},
        {"rank_messages"},
        {"rank_process", "rank_processes"},
        {"rank_executor"},
    ],
    "engine.simulated": [
        {"clock", "hardware", "model_shape", "records", "workload"},
        {"cost_model", "heat", "memory_model"},
        {"config", "runtime", "static_batch"},
        {"runner"},
        {"simulation"},
        {"report"},
        {"plot"},
        {"cli"},
    ],
    "scheduler.telemetry.sidecar.generated": [
        {"temperature_pb2"},
    ],
    "server": [
        {"engine_protocol", "errors", "request_ids", "settings"},
        {"parsers"},
        {"api", "http", "metrics"},
        {"batches", "dashboard", "generation", "switching"},
        {"routes"},
        {"app"},
        {"commands", "launch", "ray_front", "ray_router"},
        {"cli"},
        {"__main__", "ray"},
    ],
    "server.commands": [
        {"bench_report", "connection", "doctor", "run_batch", "warmup"},
        {"bench_plot", "terminal"},
        {"bench"},
    ],
    "server.batches": [{"at_once", "batch_line", "file_store"}, {"batch_runner"}],
    "server.api": [
        {
            "attrs_fields",
            "batches",
            "characters",
            "error_responses",
            "logprobs",
            "unsupported_fields",
        },
        {"structured_output", "tools"},
        {"chat_messages"},
        {"protocol"},
        {"translation"},
        {"chat_batch", "messages", "pooling", "responses", "tokens"},
        {"input_items", "invocations"},
    ],
    "server.generation": [
        {"answer_plan", "choice_stream", "response_store"},
        {"answer_blocks", "answer_writer", "embedding_run", "served_model"},
        {"prompts"},
        {"reasoning_usage"},
    ],
    "server.http": [
        {"api_keys", "json_decoder", "multipart", "paths"},
        {"error_response"},
        {
            "allowed_hosts",
            "auth",
            "cancelled_requests",
            "connections",
            "error_handlers",
            "key_limit",
            "request_body",
            "request_id_header",
        },
        {"admin_calls", "admin_signatures", "event_stream", "json_body", "tls"},
    ],
    "server.metrics": [
        {"load_report", "metric_tables", "tracing"},
        {"serving_metrics"},
        {"percentiles"},
    ],
    "server.parsers": [
        {"chat_template", "closed_schemas", "events", "text_reader"},
        {"harmony", "json_text", "python_text"},
        {"tool_parser"},
        {"forced_calls", "reasoning_parsers", "tool_parsers"},
        {"answer_parser", "registry", "structural_tags"},
        {"selection"},
    ],
    "server.routes": [
        {"context", "docs"},
        {
            "adapters",
            "admin",
            "batches",
            "dashboard",
            "generation_response",
            "health",
            "models",
            "sglang",
            "switch",
        },
        {"stored_responses"},
        {"chat", "completions", "messages", "pooling", "responses", "tokens"},
        {"invocations"},
    ],
}
"""The floors of each package, lowest first, each a set of rooms: subfolders and modules, as in the
package's folder. A room imports only from lower floors. Subpackages are named in full."""
