"""The products of experts on a Gaudi: those of transformers, in static shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import save_family
from transformers import AutoModelForCausalLM

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


def test_on_the_cpu_experts_are_compiled_in_bf16_alone(tmp_path: Path, add_tokenizer: Any) -> None:
    add_tokenizer(save_family("Mixtral", tmp_path))
    config = EngineConfig(
        model=str(tmp_path), device="cpu", dtype="float32", compile=True, max_model_len=64
    )
    with pytest.raises(ModelError, match="compiled in bf16 alone"):
        EngineCore(config)
