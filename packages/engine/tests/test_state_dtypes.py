"""Sums that layers keep of a sequence in another dtype than that in which they are computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import save_family
from request_mix import WAYS, serve

from trencadis.engine import EngineConfig, EngineCore
from trencadis.engine.core.config_payload import config_payload
from trencadis.engine.core.reconfigure import ModelSwitcher
from trencadis.engine.devices.cpu import mamba_mixer
from trencadis.engine.devices.cpu.native_kernel import NoKernel
from trencadis.engine.models.layer_states import LayerStates

from .conftest import SESSION_DEVICE

HYBRID = "Granite 4 (hybrid)"
SMALL: dict[str, Any] = {
    **{"dtype": "float32", "max_model_len": 128, "max_num_seqs": 8, "warmup": "none"},
    # A prompt is one chunk: sums are rounded after each.
    **{"max_num_batched_tokens": 512, "block_size": 8, "num_blocks": 129},
    "enable_prefix_caching": False,
}
TOKENS = [*WAYS["greedy"], *WAYS["samples"][:1]]
LIKELY = [{**WAYS["greedy"][0], "logprobs": 1}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def of_family(family: str) -> Path:
        if family not in made:
            made[family] = save_family(family, tmp_path_factory.mktemp("state"))
        return made[family]

    return of_family


def config(model: Path, dtype: str, **changes: Any) -> EngineConfig:
    return EngineConfig(model=str(model), mamba_ssm_cache_dtype=dtype, **SMALL | changes)


def numbers(core: EngineCore) -> torch.Tensor:
    """Log-probabilities of the tokens that a core generates."""
    told = serve(core, LIKELY)
    return torch.tensor(
        [[token.logprobs.chosen.logprob for token in each] for each in told.values()]
    )


def largest_difference(some: torch.Tensor, others: torch.Tensor) -> float:
    return float((some - others).abs().max())


@pytest.mark.parametrize(
    "family",
    [HYBRID, *(pytest.param(name, marks=pytest.mark.slow) for name in ("Mamba 2", "Qwen 3 Next"))],
)
def test_sums_of_bf16_take_half_of_their_memory_and_compute_nearly_the_same(
    checkpoint: Callable[[str], Path], family: str
) -> None:
    model = checkpoint(family)
    exact, half = (EngineCore(config(model, dtype)) for dtype in ("auto", "bfloat16"))
    parts: Any = exact.executor.worker.cache.states._parts  # type: ignore[attr-defined]
    sums = [part[0].numel() for (_, key), part in parts.items() if key.kind == "recurrent"]
    assert exact.facts.state_bytes - half.facts.state_bytes == 2 * sum(sums) > 0
    assert EngineCore(config(model, "float32")).facts.state_bytes == exact.facts.state_bytes
    difference = (numbers(half) - numbers(exact)).abs()
    assert difference[:, 0].max() < 1e-5, "the first token is that of a prompt, of one chunk"
    assert 0 < difference[:, 1:4].max() < 0.05


SWAPPED = {"num_blocks": 19, "num_host_blocks": 64}


@pytest.mark.parametrize(
    "changes", [{"async_scheduling": True}, {"max_num_seqs": 3}, SWAPPED], ids=str
)
def test_sums_of_bf16_are_kept_whatever_the_engine_does(
    checkpoint: Callable[[str], Path], changes: dict[str, Any]
) -> None:
    """Alone, with steps in flight, and swapped."""
    model = checkpoint(HYBRID)
    expected = serve(EngineCore(config(model, "bfloat16")), TOKENS)
    core = EngineCore(config(model, "bfloat16", **changes))
    assert serve(core, TOKENS) == expected
    assert bool(core.stats.num_swaps) == (changes == SWAPPED)


def test_a_switch_to_another_dtype_and_back_computes_in_each(
    checkpoint: Callable[[str], Path],
) -> None:
    model = checkpoint(HYBRID)
    core = EngineCore(config(model, "auto"))
    expected = {"auto": numbers(core), "bfloat16": numbers(EngineCore(config(model, "bfloat16")))}
    assert largest_difference(*expected.values()) > 4e-3
    switcher = ModelSwitcher(core)
    for dtype in ("bfloat16", "auto", "bfloat16"):
        switcher.reconfigure_engine(config_payload(config(model, dtype)), 1 << 30)
        assert largest_difference(numbers(core), expected[dtype]) < 4e-4
        switcher.sleep(1)
        switcher.wake_up()
        assert largest_difference(numbers(core), expected[dtype]) < 4e-4


@pytest.mark.skipif(SESSION_DEVICE is not None, reason="a kernel of the CPU")
def test_the_code_of_a_layer_is_given_sums_in_its_own_dtype(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its results are those of the kernel, which rounds sums after its last token."""
    model = checkpoint(HYBRID)
    by_kernel = numbers(EngineCore(config(model, "bfloat16")))
    given = set()
    get = LayerStates.get_recurrent_state

    def noted(states: LayerStates, *args: Any, **kwargs: Any) -> torch.Tensor:
        state = get(states, *args, **kwargs)
        given.add(state.dtype)
        return state

    def absent(*_: Any, **__: Any) -> Any:
        raise NoKernel("there is no C++ compiler")

    monkeypatch.setattr(LayerStates, "get_recurrent_state", noted)
    monkeypatch.setattr(mamba_mixer, "load_kernel", absent)
    assert largest_difference(numbers(EngineCore(config(model, "bfloat16"))), by_kernel) < 2e-3
    assert given == {torch.float32}
