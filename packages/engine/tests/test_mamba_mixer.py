"""The kernel of Mamba 2 beside transformers' modules, on states in the places of a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.bamba.modeling_bamba import BambaMixer
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    GraniteMoeHybridMambaLayer,
)
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer
from transformers.models.zamba2.modeling_zamba2 import Zamba2MambaMixer

from trencadis.engine.devices.cpu.mamba_mixer import MambaMixer
from trencadis.engine.devices.cpu.native_kernel import NoKernel
from trencadis.engine.models.layer_states import CONV, RECURRENT, LayerStates, StatePlaces
from trencadis.engine.models.state_mixer import computes_the_same
from trencadis.kvcache.state_cache import StateKey, StateShape

HIDDEN, HEADS, WIDTH, GROUPS = 24, 4, 12, 2
KEYS = StateKey(CONV, 0), StateKey(RECURRENT, 0)


def of_config(kind: type, model_type: str, **fields: Any) -> Any:
    config: Any = AutoConfig.for_model(model_type, hidden_size=HIDDEN, **fields)
    return kind(config, layer_idx=0)


def shared(size: int, taps: int, **fields: Any) -> dict[str, Any]:
    named = {"n_heads": HEADS, "d_head": WIDTH, "n_groups": GROUPS, "expand": 2}
    named |= {"d_state": size, "d_conv": taps}
    return {f"mamba_{name}": value for name, value in named.items()} | fields


def falcon(size: int, taps: int, **fields: Any) -> Any:
    module = of_config(
        *(FalconH1Mixer, "falcon_h1"),
        **shared(size, taps, mamba_d_ssm=HEADS * WIDTH, ssm_in_multiplier=1.5, **fields),
    )
    values = torch.Generator().manual_seed(3)
    multipliers = torch.rand(1, 1, module.in_proj.out_features, generator=values)
    module.register_buffer("mup_vector", multipliers)
    return module


MODULES = {
    "Mamba 2": lambda size, taps: of_config(
        *(Mamba2Mixer, "mamba2"),
        **{"num_heads": HEADS, "head_dim": WIDTH, "n_groups": GROUPS, "state_size": size},
        **{"conv_kernel": taps, "use_conv_bias": False, "time_step_limit": (0.3, 0.9)},
    ),
    "Bamba": lambda size, taps: of_config(BambaMixer, "bamba", **shared(size, taps)),
    "Granite 4": lambda size, taps: of_config(
        *(GraniteMoeHybridMambaLayer, "granitemoehybrid"),
        **shared(size, taps, layer_types=["mamba"], num_hidden_layers=1),
    ),
    "Zamba 2": lambda size, taps: of_config(
        *(Zamba2MambaMixer, "zamba2"),
        **{"n_mamba_heads": HEADS, "mamba_headdim": WIDTH, "mamba_ngroups": GROUPS},
        **{"mamba_expand": 2, "mamba_d_state": size, "mamba_d_conv": taps},
    ),
    "Nemotron H": lambda size, taps: of_config(
        *(NemotronHMamba2Mixer, "nemotron_h"),
        **{"mamba_num_heads": HEADS, "mamba_head_dim": WIDTH, "n_groups": GROUPS},
        **{"ssm_state_size": size, "conv_kernel": taps},
    ),
    "Falcon H1": lambda size, taps: falcon(size, taps, mamba_rms_norm=False),
    "Falcon H1 with a norm": lambda size, taps: falcon(
        size, taps, mamba_rms_norm=True, mamba_norm_before_gate=False
    ),
}


def made(family: str, size: int, taps: int, dtype: torch.dtype = torch.float32) -> Any:
    """A module with random weights, those that transformers begins with ones among them."""
    module = MODULES[family](size, taps).to(dtype)
    values = torch.Generator().manual_seed(size)
    with torch.no_grad():
        for weight in module.parameters():
            random = torch.randn(weight.shape, generator=values)
            weight.copy_(random * 0.3 if weight.dim() > 1 else random)
    return module.eval()


def places(module: Any, rows: int) -> dict[StateKey, torch.Tensor]:
    """Memory for states, full of what no row may read, and last a place of zeros."""
    shapes = (module.conv_dim, module.conv_kernel_size), (HEADS, WIDTH, module.ssm_state_size)
    dtypes = module.conv1d.weight.dtype, torch.float32
    made = {
        key: torch.full((2 * rows + 1, *shape), 1e4, dtype=dtype)
        for key, shape, dtype in zip(KEYS, shapes, dtypes, strict=True)
    }
    for part in made.values():
        part[-1] = 0
    return made


@pytest.fixture(scope="module")
def mixer() -> MambaMixer:
    try:
        return MambaMixer()
    except NoKernel as error:
        if "no C++ compiler" not in str(error):
            raise
        pytest.skip(str(error))


def computed(
    mixer: MambaMixer, module: Any, inputs: torch.Tensor, lengths: list[int]
) -> tuple[torch.Tensor, dict[StateKey, torch.Tensor]]:
    """The results for ``inputs`` in chunks of these lengths, and the last states."""
    rows = inputs.shape[0]
    parts = places(module, rows)
    here, there = torch.arange(rows), torch.arange(rows, 2 * rows)
    outs = []
    for number, chunk in enumerate(torch.split(inputs, lengths, dim=1)):
        reads = here if number else torch.full((rows,), 2 * rows)
        given = [StatePlaces(parts[key], reads, there) for key in KEYS]
        kept = {key: part[here].clone() for key, part in parts.items()}
        outs.append(mixer(module, chunk, *given))
        assert all(torch.equal(parts[key][here], state) for key, state in kept.items())
        here, there = there, here
    return torch.cat(outs, dim=1), {key: part[here] for key, part in parts.items()}


CHUNKS = [37, 1, 1, 2, 16]


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("size", "taps"), [(1, 2), (16, 4), (33, 3), (128, 4)])
@pytest.mark.parametrize("family", MODULES)
def test_the_kernel_computes_what_transformers_does(
    mixer: MambaMixer, family: str, size: int, taps: int, dtype: torch.dtype
) -> None:
    module = made(family, size, taps, dtype)
    values = torch.Generator().manual_seed(7)
    inputs = torch.randn(3, sum(CHUNKS), HIDDEN, generator=values).to(dtype)
    out, states = computed(mixer, module, inputs, CHUNKS)
    theirs = LayerStates({key: torch.zeros_like(state) for key, state in states.items()})
    given = {"cache_params": theirs}
    expected = [module(chunk, **given) for chunk in torch.split(inputs, CHUNKS, dim=1)]
    rough = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 0.1, "atol": 0.3}
    torch.testing.assert_close(out, torch.cat(expected, dim=1), **rough)
    for key, state in states.items():
        torch.testing.assert_close(state, theirs.states[key], **rough)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_does_not_depend_on_the_others_or_on_its_chunks(
    mixer: MambaMixer, dtype: torch.dtype
) -> None:
    module = made("Bamba", 33, 4, dtype)
    module.in_proj, module.out_proj = torch.nn.Identity(), torch.nn.Identity()
    values = torch.Generator().manual_seed(8)
    width = 2 * HEADS * WIDTH + 2 * GROUPS * 33 + HEADS
    inputs = torch.randn(5, 40, width, generator=values).to(dtype)
    out, states = computed(mixer, module, inputs, [40])
    for row in range(5):
        alone, state = computed(mixer, module, inputs[row : row + 1], [3, 17, 1, 19])
        assert torch.equal(alone[0], out[row])
        assert all(torch.equal(state[key][0], states[key][row]) for key in KEYS)


@torch.inference_mode()
def test_states_that_are_written_past_the_caches_are_the_same(mixer: MambaMixer) -> None:
    """Those of many rows, token by token."""
    module = made("Bamba", 128, 4)
    rows = 200
    assert rows * HEADS * WIDTH * 128 * 4 > 1 << 22, "as in the source"
    values = torch.Generator().manual_seed(10)
    inputs = torch.randn(rows, 3, HIDDEN, generator=values)
    _, states = computed(mixer, module, inputs, [1, 1, 1])
    for first in range(0, rows, 50):
        _, some = computed(mixer, module, inputs[first : first + 50], [1, 1, 1])
        for key in KEYS:
            found = states[key][first : first + 50]
            torch.testing.assert_close(found, some[key], rtol=1e-5, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("size", "rows", "tokens"), [(33, 3, 40), (64, 2, 33), (64, 3, 1), (33, 2, 1), (128, 400, 1)]
)
def test_states_of_bf16_are_those_of_fp32_that_are_rounded_after_the_last_token(
    mixer: MambaMixer, size: int, rows: int, tokens: int, dtype: torch.dtype
) -> None:
    """Past the caches, too, where there are many rows; with numbers that are none."""
    assert 400 * HEADS * WIDTH * 128 * 2 > 1 << 22, "as in the source"
    module = made("Bamba", size, 4, dtype)
    values = torch.Generator().manual_seed(11)
    inputs = torch.randn(rows, tokens, HIDDEN, generator=values).to(dtype)
    sums = torch.randn(2 * rows, HEADS, WIDTH, size, generator=values).bfloat16()
    sums[0, 0, 0, :3] = torch.tensor([torch.nan, torch.inf, 3e38])
    conv = torch.randn(2 * rows, *places(module, 1)[KEYS[0]].shape[1:], generator=values).to(dtype)
    reads, writes = torch.arange(rows), torch.arange(rows, 2 * rows)
    results = []
    for part in (sums.float(), sums.clone()):
        given = [StatePlaces(each, reads, writes) for each in (conv.clone(), part)]
        results.append((mixer(module, inputs, *given), part[writes], part[reads]))
    (expected, exact, _), (found, rounded, before) = results
    same = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(found, expected, **same)
    torch.testing.assert_close(rounded, exact.bfloat16(), **same)
    torch.testing.assert_close(before, sums[reads], **same)


@torch.inference_mode()
@pytest.mark.parametrize(("size", "taps"), [(513, 4), (16, 9)])
def test_sizes_beyond_the_memory_of_a_job_are_rejected(
    mixer: MambaMixer, size: int, taps: int
) -> None:
    module = made("Bamba", size, taps)
    with pytest.raises(ValueError, match="the kernel takes no BambaMixer of"):
        computed(mixer, module, torch.zeros(1, 2, HIDDEN), [2])


@torch.inference_mode()
def test_a_kernel_that_finds_no_memory_is_an_error(
    mixer: MambaMixer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception of C++ would end the process."""
    sizes = {"rows": 1, "tokens": 1, "heads": 1 << 50, "width": 12, "groups": 1, "size": 16}
    others = {"taps": 4, "known": 4, "of_norm": 12, "threads": 1}
    status = mixer._mix(*[None] * 14, 0, 0, *sizes.values(), *others.values(), 0, 0, 0, 0, 0)
    assert status == 2
    monkeypatch.setattr(mixer, "_mix", lambda *_: status)
    with pytest.raises(MemoryError, match="a kernel of the CPU found no memory"):
        computed(mixer, made("Bamba", 16, 4), torch.zeros(1, 2, HIDDEN), [2])


@torch.inference_mode()
def test_a_module_of_another_kind_keeps_its_own_code(mixer: MambaMixer) -> None:
    shapes = tuple(
        StateShape(key, tuple(part.shape[1:]), part.dtype)
        for key, part in places(made("Bamba", 16, 4), 2).items()
    )
    hidden = torch.randn(2, 3, HIDDEN, generator=torch.Generator().manual_seed(9))

    def takes(module: Any) -> bool:
        return computes_the_same(mixer, module, "cache_params", shapes, hidden)

    assert takes(made("Bamba", 16, 4))
    before = falcon(16, 4, mamba_rms_norm=True, mamba_norm_before_gate=True)
    assert not takes(before)
    relu = made("Bamba", 16, 4)
    relu.activation, relu.act = "relu", torch.nn.ReLU()
    assert not takes(relu)
    mixed = made("Bamba", 16, 4)
    mixed.D.data = mixed.D.data.to(torch.bfloat16)
    assert not takes(mixed)
    other = made("Bamba", 16, 4)
    other.A_log.data += 0.5
    wrong = made("Bamba", 16, 4)

    given = wrong, "cache_params", shapes, hidden
    assert computes_the_same(mixer, *given)

    def of_other(_: Any, *states: Any) -> torch.Tensor:
        return mixer(other, *states)

    assert not computes_the_same(of_other, *given)

    def wrong_for_bf16(module: Any, rows: torch.Tensor, *states: StatePlaces) -> torch.Tensor:
        out = mixer(module, rows, *states)
        return -out if states[1].part.dtype is torch.bfloat16 else out

    assert not computes_the_same(wrong_for_bf16, *given)
