"""Random numbers of a draw, equal on every device.

A token is drawn as the first event of a race: each token waits for an exponential time divided by
its probability (the Gumbel-max trick; Maddison, Tarlow and Minka, "A* Sampling", 2014). A rounding
error of one token's score changes the draw only where two scores are that close, about once in a
million tokens. Inverting a cumulative distribution would add up the errors of a whole vocabulary.

The time of a token is a function of the draw's keys and the token's id: a Feistel network (Luby and
Rackoff, 1988) over two halves of 16 bits. Every intermediate number is an integer from 0 to
2**31 - 1, so no device's rule for overflow, signs or shifts matters.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import numpy.typing as npt
import torch

_MULTIPLIERS = (0x6E2D, 0x5BD3, 0x7A5F, 0x4F1B, 0x7433, 0x59E7)
"""One odd number below 2**15 for each round: its product with 16 bits stays below 2**31."""

NUM_KEYS = len(_MULTIPLIERS)
"""Keys of a draw, one for each round. With 4 rounds the numbers of two tokens depend on each other
measurably, with 5 they do not; the sixth is a margin."""

_SHIFT = 7
"""Bits 7 to 22 of a product depend on all bits of the half that was multiplied."""


def draw_keys(seed: int, position: int) -> npt.NDArray[np.int32]:
    """The keys ``[NUM_KEYS]`` of the draw at ``position``, numbers of 16 bits."""
    digest = hashlib.blake2b(struct.pack("<qq", seed, position), digest_size=2 * NUM_KEYS).digest()
    return np.frombuffer(digest, "<u2").astype(np.int32)


def log_times(token_ids: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The logarithm of each token's exponential time, fp32 ``[rows, tokens]``.

    ``token_ids`` is int32 ``[rows or 1, tokens]``, ``keys`` int32 ``[rows, NUM_KEYS]``. The token
    with the largest ``log_probability - log_time`` is drawn.
    """
    left, right = token_ids >> 16, token_ids & 0xFFFF
    for number, multiplier in enumerate(_MULTIPLIERS):
        # In place: on the CPU half the time, since fewer tensors compete for the cache.
        mixed = right ^ keys[:, number : number + 1]
        mixed *= multiplier
        mixed >>= _SHIFT
        mixed &= 0xFFFF
        mixed ^= left
        left, right = right, mixed
    # Half a unit keeps the number above 0; the largest fp32 below 1 keeps the time finite.
    uniform = left.float().mul_(65536.0).add_(right).add_(0.5).mul_(2.0**-32)
    return uniform.clamp_max_(1.0 - 2.0**-24).neg_().log1p_().neg_().log_()
