"""The floats that a program makes of their bits."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from trencadis.engine.runner.float_bits import floats_of, powers_of_two

numbers = st.floats(width=32, allow_nan=False, allow_subnormal=False)


@given(st.lists(numbers, min_size=1))
def test_a_number_is_that_of_its_bits(values: list[float]) -> None:
    floats = np.array(values, np.float32)
    bits = torch.from_numpy(floats.view(np.int32))[None]
    made = floats_of(bits, powers_of_two())
    assert made.dtype is torch.float32
    assert made[0].numpy().tobytes() == floats.tobytes()


def test_no_power_is_subnormal() -> None:
    powers = powers_of_two()
    assert powers[0] == 0.0
    assert powers[1:255].tolist() == [2.0**exponent for exponent in range(-126, 128)]
