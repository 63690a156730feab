"""The products of experts on a Gaudi: those of transformers, in static shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import save_family
from transformers import AutoModelForCausalLM, MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from trencadis.engine import EngineConfig, EngineCore, ModelError
from trencadis.engine.devices.hpu import experts as products


def experts_of(family: str, directory: Path) -> Any:
    """The first expert module of a tiny model, with transformers' own loop."""
    save_family(family, directory)
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, experts_implementation="eager"
    )
    return next(each for each in model.modules() if hasattr(each, "_is_expert_parallel"))


@pytest.mark.parametrize("family", ["Mixtral", "gpt-oss", "Granite 3 (MoE)"])
@torch.inference_mode()
def test_all_experts_give_the_sum_of_those_that_were_chosen(family: str, tmp_path: Path) -> None:
    """gpt-oss has biases, weights the other way round and a gate of its own."""
    experts = experts_of(family, tmp_path)
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, experts.gate_up_proj.shape[2 - experts.is_transposed], generator=random)
    chosen = torch.rand(7, experts.num_experts, generator=random).topk(2).indices
    weights = torch.rand(7, 2, generator=random)
    expected = experts(hidden, chosen, weights)
    assert expected.abs().max() > 0
    torch.testing.assert_close(products.all_experts(experts, hidden, chosen, weights), expected)


@torch.inference_mode()
def test_an_expert_that_was_not_chosen_adds_nothing_even_if_infinite(tmp_path: Path) -> None:
    experts = experts_of("Mixtral", tmp_path)
    experts.down_proj[1] = torch.inf
    hidden = torch.ones(2, experts.gate_up_proj.shape[2])
    chosen = torch.tensor([[0, 2], [0, 2]])
    out = products.all_experts(experts, hidden, chosen, torch.ones(2, 2))
    assert torch.isfinite(out).all()


@pytest.mark.parametrize(("error", "used"), [(0.0, True), (0.5, False)])
def test_a_kernel_that_differs_is_not_used(
    stand_in, error: float, used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = experts_of("Mixtral", tmp_path).to(torch.bfloat16)
    fused = products.fused_experts
    monkeypatch.setattr(products, "fused_experts", lambda *given: fused(*given) + error)
    with stand_in("lazy"):
        products.use_static_experts(experts, torch.device("hpu"))
    chosen = experts.config._experts_implementation
    assert chosen == ("trencadis_fused_experts" if used else "trencadis_all_experts")


SHAPES = {
    "experts": lambda experts, hidden, chosen: experts.num_experts == 12,
    "experts of a token": lambda experts, hidden, chosen: chosen.shape[1] == 3,
    "width of a token": lambda experts, hidden, chosen: hidden.shape[1] == 80,
    "width of an expert": lambda experts, hidden, chosen: experts.down_proj[0].shape[1] == 24,
}
"""Shapes of a model at which a kernel may be wrong."""


@pytest.mark.parametrize("wrong", [None, *SHAPES])
@torch.inference_mode()
def test_a_kernel_is_tried_at_the_shapes_of_the_model(
    stand_in, wrong: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It leaves the last expert out, and only at one of the model's shapes."""
    config = MixtralConfig(
        hidden_size=80, intermediate_size=24, num_local_experts=12, num_experts_per_tok=3
    )
    experts = MixtralExperts(config).to(torch.bfloat16)
    right = products.fused_experts

    def kernel(experts: Any, hidden: Any, chosen: Any, weights: Any) -> torch.Tensor:
        if wrong is not None and SHAPES[wrong](experts, hidden, chosen):
            weights = torch.where(chosen == experts.num_experts - 1, 0.0, weights)
        return right(experts, hidden, chosen, weights)

    monkeypatch.setattr(products, "fused_experts", kernel)
    with stand_in("lazy"):
        products.use_static_experts(experts, torch.device("hpu"))
    used = experts.config._experts_implementation == "trencadis_fused_experts"
    assert used == (wrong is None)
    said = "mixture_of_experts with 3 of 12 experts of 24 for 80 numbers is not used: it differs"
    assert (said in caplog.text) == (wrong is not None)


def test_a_trial_of_all_experts_takes_hardly_more_memory_than_one_takes(stand_in) -> None:
    sizes = products.ExpertSizes(number=128, chosen=8, hidden=512, inner=256)
    of_one = 3 * sizes.hidden * sizes.inner * torch.bfloat16.itemsize
    with stand_in("eager") as bridge, torch.inference_mode():
        bridge.memory.peak = before = bridge.memory.in_use
        found, expected = products.experts_trial(torch.device("hpu"), torch.bfloat16, sizes)
        taken = bridge.memory.peak - before
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0)
    assert taken < 12 * of_one


def test_on_the_cpu_experts_are_compiled_in_bf16_alone(tmp_path: Path, add_tokenizer: Any) -> None:
    add_tokenizer(save_family("Mixtral", tmp_path))
    config = EngineConfig(
        model=str(tmp_path), device="cpu", dtype="float32", compile=True, max_model_len=64
    )
    with pytest.raises(ModelError, match="compiled in bf16 alone"):
        EngineCore(config)
