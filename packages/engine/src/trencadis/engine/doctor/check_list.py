"""The checks in their order: what each needs, how long it may take, what helps where it fails."""

from __future__ import annotations

import enum

import attrs


class Need(enum.IntEnum):
    """What has to work before a check makes sense; each includes the ones before it."""

    NOTHING = 0
    DEVICE = 1
    ENGINE = 2


@attrs.frozen
class Check:
    """``limits``: how many times the limit of a check it may take."""

    name: str
    need: Need = Need.NOTHING
    remedy: str = ""
    limits: int = 1


DEVICE, ENGINE = "device", "engine start"
"""The checks that make what those after them need."""

SOFTWARE = ("python", "trencadis", "torch", "transformers", "bridge", "driver")

KERNELS = (
    "FusedSDPA",
    "FusedSDPA in slices",
    "block_softmax_adjustment",
    "FusedRMSNorm",
    "apply_rotary_pos_emb",
    "mixture_of_experts",
    "fp8_gemm_v2",
    "cast_from_fp8",
    "index_copy_",
    "index_reduce_ amax",
)
"""The kernels that the engine may use on a Gaudi: the keys of its `Device.kernel_trials`."""

REQUIRED_KERNELS = ("index_copy_", "index_reduce_ amax")
"""Those that nothing replaces."""

PROGRAMS = (
    *("prompt", "prompt with context", "decode", "decode with shared blocks"),
    *("draw random", "draw top-p", "draw top-k", "log-probabilities", "edits", "mask"),
    *("beam search", "block copies", "swap"),
)

_OF_SOFTWARE = "install what the release notes of the device's software name together"
_OF_KERNEL = "the engine serves without this kernel, more slowly: send this report"
_OF_REQUIRED = (
    "nothing replaces this kernel, and tokens would be wrong: install another release of the "
    "device's software, and send this report"
)
_OF_PROGRAM = "send this report; if --enforce-eager serves, the compiler is at fault"
_OF_TOKENS = (
    "do not serve with it: find which kernel above differs, or try --dtype float32 or "
    "--enforce-eager, and send this report"
)


KERNEL, PROGRAM = "kernel", "program"
"""The first words of their checks' names."""

TOKENS = ("tokens greedy", "tokens seeded", "tokens of a shared prefix")
REPLAY, STEP, MEMORY = "graph replay", "decode step", "device memory"
WARM_UP = "full warm-up"

REFERENCE = "reference"
"""What the CPU is asked for the tokens to compare with."""

CHECKS = (
    *(Check(name, remedy=_OF_SOFTWARE) for name in SOFTWARE),
    Check(
        DEVICE,
        remedy="see that the driver lists the device and no other process holds it",
        limits=2,
    ),
    *(
        Check(
            f"{KERNEL} {name}",
            Need.DEVICE,
            _OF_REQUIRED if name in REQUIRED_KERNELS else _OF_KERNEL,
        )
        for name in KERNELS
    ),
    Check(ENGINE, Need.DEVICE, "start engine-serve with the same flags and read its log", limits=5),
    *(Check(f"{PROGRAM} {name}", Need.ENGINE, _OF_PROGRAM) for name in PROGRAMS),
    Check(REPLAY, Need.ENGINE, "each step launches every operation: send this report"),
    *(Check(name, Need.ENGINE, _OF_TOKENS, limits=2) for name in TOKENS),
    Check(STEP, Need.ENGINE, "send this report: the simulator is calibrated with it", limits=2),
    Check(MEMORY, Need.ENGINE, "send this report"),
    # Last: it replaces the engine of the others.
    Check(WARM_UP, Need.ENGINE, "serve with --warmup background or none, and send this report", 5),
)

LIMIT_S = 60.0
"""Default limit of a check, in seconds."""

ALL_LIMITS = 10
"""Limits of a check that all of them together may take: ten minutes by default."""

REFERENCE_LIMITS = 3
"""Limits of a check that the CPU may take for the tokens to compare with."""
