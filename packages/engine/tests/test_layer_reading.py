"""What the layers of a configuration need is read from transformers' own code."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from model_families import FAMILIES, SIZES, WINDOW
from transformers import AutoConfig, AutoModelForCausalLM, PhimoeConfig

from trencadis.engine import ModelError
from trencadis.engine.models.attention_operator import attend_in_program, forward_pass
from trencadis.engine.models.block_attention import BlockAttention
from trencadis.engine.models.decoder_layers import DecoderLayers
from trencadis.engine.models.layer_reading import check_layers, declare_layers, read_layers
from trencadis.engine.models.layer_spec import LayerSpec, feature_beyond
from trencadis.engine.models.paged_context import PromptContext
from trencadis.kvcache.state_cache import StateKey, StateShape
from trencadis.kvcache.tensors import KVCache

SPEC = LayerSpec(heads=4, kv_heads=2, key_width=16, value_width=16, scale=0.25)


def config_of(family: str, **changes: Any) -> Any:
    model_type, own = FAMILIES[family]
    return AutoConfig.for_model(model_type, **SIZES | own | changes)


def read(family: str, **changes: Any) -> tuple[LayerSpec, ...]:
    return read_layers(config_of(family, **changes), family)


def test_plain_layers_are_plain_whatever_the_family() -> None:
    for family in ("Llama", "Qwen 2", "OLMo 2", "Phi-3", "SmolLM 3"):
        assert read(family) == (SPEC,) * 4


def test_heads_widths_and_scale_are_those_of_the_calls() -> None:
    latent = read("DeepSeek V3")[0]
    assert (latent.heads, latent.kv_heads, latent.key_width, latent.value_width) == (4, 4, 24, 8)
    assert latent.scale == 24**-0.5
    assert {layer.scale for layer in read("Granite 3")} == {0.2}
    assert {layer.kv_heads for layer in read("GPT-2")} == {4}


def test_windows_chunks_sinks_and_bounds_are_of_single_layers() -> None:
    assert [layer.window for layer in read("Gemma 2")] == [WINDOW, None] * 2
    assert {layer.softcap for layer in read("Gemma 2")} == {50.0}
    assert [layer.window for layer in read("Qwen 2 with use_sliding_window")] == [
        *(None, None, WINDOW, WINDOW)
    ]
    assert [layer.chunk for layer in read("Llama 4 (text)")] == [WINDOW] * 3 + [None]
    assert {layer.sinks for layer in read("gpt-oss")} == {True}
    assert {layer.window for layer in read("Qwen 2", sliding_window=WINDOW)} == {None}


def test_a_window_that_is_a_mask_alone_is_read() -> None:
    config = PhimoeConfig(**SIZES | {"sliding_window": WINDOW, "num_local_experts": 4})
    assert {layer.window for layer in read_layers(config, "it")} == {WINDOW}


def test_experts_are_those_of_a_layer() -> None:
    assert [layer.experts for layer in read("DeepSeek V3")] == [0, 4, 4, 4]
    assert {layer.experts for layer in read("Mixtral")} == {4}
    assert {layer.experts for layer in read("Llama")} == {0}


def test_states_are_those_that_layers_give_to_the_cache_of_transformers() -> None:
    conv, recurrent = StateKey("conv", 0), StateKey("recurrent", 0)
    mamba = (
        StateShape(conv, (144, 4)),
        StateShape(recurrent, (8, 16, 8), torch.float32),  # also in a model of bf16
    )
    assert [layer.states for layer in read("Granite 4 (hybrid)")] == [mamba, ()] * 2
    assert [layer.heads for layer in read("Granite 4 (hybrid)")] == [0, 4] * 2
    assert {(layer.states, layer.heads) for layer in read("Falcon-H1")} == {(mamba, 4)}
    assert {layer.heads for layer in read("Mamba 2")} == {0}
    assert [layer.states for layer in read("LFM 2")] == [(StateShape(conv, (64, 3)),), ()] * 2
    assert {layer.kind for layer in read("Nemotron-H")} == {"attention"}


def test_a_layer_of_another_kind_is_named_as_transformers_does() -> None:
    """MiniMax has a cache of its own; the attention of Zaya keeps a state besides."""
    layers = read_layers(AutoConfig.for_model("minimax", num_hidden_layers=2), "it")
    assert {layer.kind for layer in layers} == {"attention", "linear_attention"}
    layers = read_layers(AutoConfig.for_model("zaya", num_hidden_layers=2), "it")
    assert {layer.kind for layer in layers} == {"hybrid"}


def test_a_layer_that_attends_twice_or_with_a_mask_of_its_own_says_so() -> None:
    assert {layer.calls for layer in read("DiffLlama")} == {2}
    assert {layer.others for layer in read("Doge")} == {("attention_mask",)}


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("Nemotron", {}, "NemotronAttention does not pass on"),
        ("StableLM", {}, "StableLmForCausalLM computes its own attention"),
        ("Llama", {"hidden_size": None}, "no model can be made of the config.json of Llama"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    family: str, changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, "StableLM", ("stablelm", {}))
    config = config_of(family)
    for name, value in changes.items():
        vars(config)[name] = value
    with pytest.raises(ModelError, match=reason) as refused:
        read_layers(config, family)
    assert "\n" not in str(refused.value)


def test_a_window_of_the_longest_sequence_is_none() -> None:
    layer = attrs.evolve(SPEC, window=WINDOW, chunk=2 * WINDOW)
    assert layer.within(WINDOW) == SPEC
    assert layer.within(WINDOW + 1) == attrs.evolve(SPEC, window=WINDOW)
    assert layer.within(2 * WINDOW + 1) == layer


def test_a_shorter_length_is_advised_only_where_it_is_enough() -> None:
    slides = attrs.evolve(SPEC, window=WINDOW)
    bounded = attrs.evolve(SPEC, softcap=5.0)
    supports = feature_beyond
    with pytest.raises(
        ModelError, match=r"layer 1 .* window of 32 tokens: .* max_model_len to 32$"
    ):
        check_layers([SPEC, slides], supports, "it")
    with pytest.raises(ModelError, match=r"layer 1 bounds its scores to 5.0: serve another model$"):
        check_layers([slides, bounded], supports, "it")
    check_layers([SPEC], supports, "it")


def test_layers_of_different_spec_are_compiled_apart() -> None:
    model = AutoModelForCausalLM.from_config(config_of("Llama"))
    cache = KVCache(layers=[SPEC] * 4, num_blocks=2, block_size=4, dtype=torch.float32)
    for scales, kinds in (([0.25] * 4, 1), ([0.25, 0.5] * 2, 2)):
        declare_layers(model, [attrs.evolve(SPEC, scale=scale) for scale in scales])
        layers = DecoderLayers(model, cache)
        assert layers.num_kinds == kinds
        layers.release()


def test_experts_in_fp32_are_not_compiled() -> None:
    model = AutoModelForCausalLM.from_config(config_of("Mixtral"), dtype=torch.float32)
    declare_layers(model, read("Mixtral"))
    cache = KVCache(layers=[SPEC] * 4, num_blocks=2, block_size=4, dtype=torch.float32)
    with pytest.raises(ModelError, match="without --compile"):
        DecoderLayers(model, cache)
    DecoderLayers(model.bfloat16(), cache)


def test_an_operator_attends_as_the_layer_that_runs() -> None:
    class Noting(BlockAttention):
        as_operator = True

        def attend(self, *given: Any) -> torch.Tensor:
            noted.append(given[3:])
            return super().attend(*given)

    noted: list[Any] = []
    cache = KVCache(layers=[SPEC] * 2, num_blocks=2, block_size=4, dtype=torch.float32)
    slots = torch.tensor([1, 1]), torch.tensor([0, 1])
    paged = PromptContext(cache, 1, *slots, attention=Noting())
    rows = [torch.randn(1, heads, 2, 16) for heads in (4, 2, 2)]
    outs = []
    for layer, scale in enumerate((0.25, 2.0)):
        spec = attrs.evolve(SPEC, scale=scale)
        with forward_pass(paged, layer, spec):
            outs.append(attend_in_program(*rows))
        assert noted[-1] == (layer, paged, spec, None)
    assert not torch.allclose(*outs)
