"""The sizes of a model's matrices, read from the ``config.json`` of its checkpoint.

Decoder-only models with gated feed-forward layers (Llama, Mistral, Qwen, Gemma, …), or with routed
experts in every layer (Mixtral, Qwen3-MoE). Biases and further norms are left out: below 0.1 % of
the weights. Layers with a window read what it sees; they keep their blocks as others do, which is
so on devices with buckets.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from trencadis.engine.errors import ConfigError, ModelError
from trencadis.kvcache import ceil_div

LOGIT_BYTES = 4
"""Bytes of one logit: logits are converted to fp32 before sampling."""

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

_NOT_MODELLED = {
    "quantization_config": "quantised weights",
    "n_routed_experts": "a mixture with shared experts",
    "num_shared_experts": "a mixture with shared experts",
    "shared_expert_intermediate_size": "a mixture with shared experts",
    "mlp_only_layers": "a mixture with dense layers",
}


_EXPERTS = ("num_local_experts", "num_experts")
"""How Mixtral and Qwen3-MoE call the number of experts."""


@attrs.frozen(kw_only=True)
class ModelShape:
    """Sizes of a model: widths in elements, bytes per element.

    ``dtype_bytes`` is the type of the checkpoint and of activations, ``matrix_dtype_bytes`` that of
    the layers' weight matrices, ``kv_dtype_bytes`` that of the KV cache, ``attention_dtype_bytes``
    that of the products with keys and values.

    ``intermediate_size``: what a token computes with in a feed-forward layer: of ``num_experts``
    experts (0: none) the ``experts_per_token`` that it is routed to, together.

    ``windows``: of each layer whose tokens do not see all before them, what they see with
    themselves, in tokens.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied: bool
    dtype_bytes: int
    max_position_embeddings: int
    matrix_dtype_bytes: int = attrs.field()
    kv_dtype_bytes: int = attrs.field()
    attention_dtype_bytes: int = attrs.field()
    num_experts: int = 0
    experts_per_token: int = 0
    windows: tuple[int, ...] = ()

    @matrix_dtype_bytes.default
    def _unquantized_matrices(self) -> int:
        return self.dtype_bytes

    @kv_dtype_bytes.default
    def _unquantized_cache(self) -> int:
        return self.dtype_bytes

    @attention_dtype_bytes.default
    def _unquantized_attention(self) -> int:
        return self.dtype_bytes

    def quantized(self, *, matrices: bool, kv_cache: bool, attention: bool = False) -> ModelShape:
        """The same model with the layers' matrices, the KV cache or attention in FP8.

        This engine reads a cache of FP8 in the model's type; Intel's software attends in FP8.
        Embedding, output head and norms keep their type, as under vLLM's ``fp8`` and in the
        configurations that vllm-gaudi's calibration writes for ``inc`` (calibrate_model.sh).
        """
        return attrs.evolve(
            self,
            matrix_dtype_bytes=1 if matrices else self.matrix_dtype_bytes,
            kv_dtype_bytes=1 if kv_cache else self.kv_dtype_bytes,
            attention_dtype_bytes=1 if attention else self.attention_dtype_bytes,
        )

    def divided(self, num_ranks: int) -> ModelShape:
        """What one of ``num_ranks`` ranks has: its heads, its part of each product and of the
        vocabulary. KV heads are repeated where there are fewer than ranks.

        Raises `ConfigError` where the heads cannot be divided.
        """
        few, many = sorted((num_ranks, self.num_kv_heads))
        if self.num_heads % num_ranks or many % few:
            raise ConfigError(
                f"tensor_parallel_size {num_ranks} does not divide {self.num_heads} attention "
                f"heads with {self.num_kv_heads} KV heads: take a number that does",
                "tensor_parallel_size",
            )
        return attrs.evolve(
            self,
            num_heads=self.num_heads // num_ranks,
            num_kv_heads=max(1, self.num_kv_heads // num_ranks),
            intermediate_size=ceil_div(self.intermediate_size, num_ranks),
            vocab_size=ceil_div(self.vocab_size, num_ranks),
        )

    @property
    def dense_matrices(self) -> int:
        """Elements of the weight matrices of one layer that every token is multiplied with."""
        attention = self.num_heads * self.head_dim
        kv = self.num_kv_heads * self.head_dim
        others = self.num_experts or 3 * self.intermediate_size  # a router, or the layer itself
        return self.hidden_size * (2 * attention + 2 * kv + others)

    @property
    def expert_matrices(self) -> int:
        """Elements of the weight matrices of one expert, 0 without experts."""
        if not self.num_experts:
            return 0
        return 3 * self.hidden_size * ceil_div(self.intermediate_size, self.experts_per_token)

    @property
    def layer_matrices(self) -> int:
        """Elements of the weight matrices of one layer."""
        return self.dense_matrices + self.num_experts * self.expert_matrices

    @property
    def num_parameters(self) -> int:
        """All weights: embedding, layers with two norms each, final norm, output head."""
        table = self.vocab_size * self.hidden_size
        layers = self.num_layers * (self.layer_matrices + 2 * self.hidden_size)
        return table * (1 if self.tied else 2) + layers + self.hidden_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        matrices = self.num_layers * self.layer_matrices
        others = self.num_parameters - matrices
        return matrices * self.matrix_dtype_bytes + others * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one position in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.kv_dtype_bytes


def read_model_shape(path: str | os.PathLike[str]) -> ModelShape:
    """Read a ``config.json``, or the one in a checkpoint's directory.

    Raises `ModelError` for another kind of file, and for a model that is not modelled.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{file}: {error.strerror}: give a model's config.json") from error
    except ValueError as error:
        raise ModelError(f"{file} is not JSON ({error}): give a model's config.json") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file} is not a JSON object: give a model's config.json")
    for key, what in _NOT_MODELLED.items():
        if config.get(key):
            raise ModelError(
                f"{file} has {key}, and {what} is not modelled: take a bf16 model without, whose "
                "weights --quantization fp8 quantises"
            )
    if config.get("decoder_sparse_step", 1) != 1:
        raise ModelError(
            f"{file} has decoder_sparse_step {config['decoder_sparse_step']!r}, and a mixture with "
            "dense layers is not modelled: take a model with experts in every layer, or in none"
        )
    return _shape(file, config)


def _shape(file: Path, config: Mapping[str, Any]) -> ModelShape:
    hidden, heads = _size(file, config, "hidden_size"), _size(file, config, "num_attention_heads")
    model_type = str(config.get("model_type", ""))
    experts = next((key for key in _EXPERTS if config.get(key)), None)
    num_experts = 0 if experts is None else _size(file, config, experts)
    per_token = _size(file, config, "num_experts_per_tok") if num_experts else 0
    if per_token > num_experts:
        raise ModelError(
            f"{file} has {per_token} as num_experts_per_tok and {num_experts} as {experts}: give "
            "the config.json of a decoder-only model"
        )
    width = _size(file, config, "intermediate_size")
    if num_experts:
        width = per_token * _size(file, config, "moe_intermediate_size", width)
    return ModelShape(
        hidden_size=hidden,
        num_layers=_size(file, config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_size(file, config, "num_key_value_heads", heads),
        head_dim=_size(file, config, "head_dim", hidden // heads),
        intermediate_size=width,
        num_experts=num_experts,
        experts_per_token=per_token,
        vocab_size=_size(file, config, "vocab_size"),
        # A config omits its class's default; among these classes, only Gemma ties by default.
        tied=bool(config.get("tie_word_embeddings", model_type.startswith("gemma"))),
        dtype_bytes=_dtype_bytes(file, config),
        max_position_embeddings=_size(file, config, "max_position_embeddings"),
        windows=_windows(file, config, model_type),
    )


_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4}
"""Every how many layers one sees all tokens, where a config does not say it (transformers'
``configuration_*.py`` of these families)."""

_ALL_LAYERS = ("mistral", "mixtral", "phi3", "starcoder2")
"""Families whose window is that of every layer."""


def _windows(file: Path, config: Mapping[str, Any], model_type: str) -> tuple[int, ...]:
    """Of the layers that have a window, as transformers' configurations say which do."""
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        return ()
    window, layers = (_size(file, config, x) for x in ("sliding_window", "num_hidden_layers"))
    types, pattern = config.get("layer_types"), _PATTERNS.get(model_type)
    count: int
    if isinstance(types, list):
        if len(types) != layers:
            raise ModelError(
                f"{file} has {len(types)} layer_types for {layers} layers: give the config.json of "
                "a decoder-only model"
            )
        count = types.count("sliding_attention")
    elif pattern is not None or "sliding_window_pattern" in config:
        every = _size(file, config, "sliding_window_pattern", pattern)
        count = layers - layers // every
    elif config.get("use_sliding_window"):
        count = max(0, layers - _size(file, config, "max_window_layers", layers))
    else:
        count = layers if model_type in _ALL_LAYERS else 0
    return (window,) * count


def _size(file: Path, config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        found = "no" if value is None else f"{value!r} as"
        raise ModelError(f"{file} has {found} {key}: give the config.json of a decoder-only model")
    return value


def _dtype_bytes(file: Path, config: Mapping[str, Any]) -> int:
    """Default bf16. Transformers 5 writes ``dtype``, older versions ``torch_dtype``."""
    name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if name not in _BYTES:
        raise ModelError(f"{file} has dtype {name!r}: use one of {', '.join(_BYTES)}")
    return _BYTES[name]
