"""Loads a checkpoint: the model is transformers' own module with paged attention."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from trencadis.engine.api.scoring import PairForm, Scoring
from trencadis.engine.api.text_prompts import TextPrompts
from trencadis.engine.errors import ModelError
from trencadis.engine.models.attention import ATTENTION_NAME
from trencadis.engine.models.broken_files import BROKEN_FILE_ERRORS, reason_of
from trencadis.engine.models.checkpoint import locate
from trencadis.engine.models.declared_modules import read_max_seq_length, read_prompts
from trencadis.engine.models.layer_reading import declare_layers, read_layers
from trencadis.engine.models.layer_spec import LayerSpec
from trencadis.engine.models.packed_checkpoint import loading_arguments
from trencadis.engine.models.packed_formats import Packing, read_packing
from trencadis.engine.models.packed_gguf import read_gguf_packing
from trencadis.engine.models.packed_weight import WeightFormat
from trencadis.engine.models.pair_prompts import find_scoring
from trencadis.engine.models.pooling import (
    check_causal,
    check_hidden_states,
    head_name,
    is_headless_decoder,
    remove_head,
)
from trencadis.engine.models.rank_loading import DividedModel
from trencadis.engine.models.real_rotary import use_real_rotary
from trencadis.engine.models.rotary import angles_of, check_angles, pin_frequencies
from trencadis.engine.models.rounded_weights import ROUNDED_FORMATS
from trencadis.engine.models.score_heads import (
    as_scorer,
    check_labels,
    is_classifier,
    keep_tokens,
)
from trencadis.engine.models.state_layers import find_state_layers
from trencadis.engine.models.weight_files import check_directory

logger = logging.getLogger("trencadis.engine")

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@attrs.frozen(kw_only=True)
class ModelSpec:
    """The facts about a checkpoint that the engine needs before it loads the weights.

    ``source`` is a directory or a hub id that transformers can load. Lengths are in tokens.
    ``layers``: what each decoder layer needs, for sequences of any length.
    ``is_pooling``: it is loaded without its output head, for embeddings or, as ``scoring`` tells,
    for scores. ``max_seq_length``: the length to which it declares texts to be cut; None for that
    of its context. ``text_prompts``: the prompts that it declares for texts to embed.
    ``packing``: how its linear layers are packed.
    """

    source: str
    config: PreTrainedConfig = attrs.field(repr=False)
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: frozenset[int]
    layers: Sequence[LayerSpec]
    is_pooling: bool = False
    scoring: Scoring | None = None
    max_seq_length: int | None = None
    text_prompts: TextPrompts = attrs.field(factory=TextPrompts)
    packing: Packing | None = None

    def weight_format(self, quantization: str) -> WeightFormat | None:
        """That of packed weights, or of those that `round_weights` makes; None for neither."""
        return ROUNDED_FORMATS.get(quantization) if self.packing is None else self.packing.form


def inspect_model(
    name: str,
    *,
    is_pooling: bool = False,
    score_prompt: PairForm | None = None,
    chat_template: str | None = None,
) -> ModelSpec:
    """Find a checkpoint and read its configuration.

    ``name`` is a directory, a GGUF file, or a hub id. Raises `ModelError` if there is no such
    checkpoint, or if it is not a decoder-only language model; with ``is_pooling`` it may have been
    saved without its output head, or with a score head, and must be causal. ``score_prompt`` and
    ``chat_template``: as `find_scoring`.
    """
    source = locate(name)
    config = _read_config(source, name)
    _check_decoder_only(config, name, is_pooling=is_pooling)
    if is_pooling:
        check_causal(config, name)
    text = config.get_text_config(decoder=True)
    spec = ModelSpec(
        source=source,
        config=config,
        vocab_size=text.vocab_size,
        max_position_embeddings=getattr(text, "max_position_embeddings", 2048),
        eos_token_ids=_eos_token_ids(source, text),
        is_pooling=is_pooling,
        layers=read_layers(config, name),
        packing=_read_packing(config, name, source),
    )
    _check_sizes(spec, name)
    return _inspect_pooling(spec, name, score_prompt, chat_template) if is_pooling else spec


def _inspect_pooling(
    spec: ModelSpec, name: str, score_prompt: PairForm | None, chat_template: str | None
) -> ModelSpec:
    """The facts with those of a model that generates nothing."""
    architectures = spec.config.architectures or ()
    has_score_head = any(is_classifier(spec.config, each) for each in architectures)
    if has_score_head:
        check_labels(spec.config, name)
    scoring = find_scoring(
        spec.source,
        name,
        spec.config,
        has_score_head=has_score_head,
        form=score_prompt,
        chat_template=chat_template,
    )
    return attrs.evolve(
        spec,
        scoring=scoring,
        max_seq_length=read_max_seq_length(spec.source),
        text_prompts=read_prompts(spec.source) if scoring is None else TextPrompts(),
    )


def check_weight_files(spec: ModelSpec) -> None:
    """Raise `ModelError` where `load_model` would find weight files missing or cut off.

    Those of a hub id are in the hub's cache, which checks them.
    """
    source = Path(spec.source)
    if source.is_dir() and not getattr(spec.config, "transformers_weights", None):
        check_directory(source)


def resolve_dtype(
    name: str,
    spec: ModelSpec,
    preferred: torch.dtype,
    supported: Collection[torch.dtype] | None = None,
) -> torch.dtype:
    """The dtype called ``name``, or ``preferred`` with a warning if it is not ``supported``.

    ``auto`` is the checkpoint's dtype if that is bf16 or fp16, else ``preferred``, the device's: so
    for packed weights, which a device multiplies in that one.
    ``supported`` of None is all.
    """
    if name == "auto":
        stored = getattr(spec.config, "dtype", None)
        wanted = stored if stored in (torch.bfloat16, torch.float16) else preferred
        wanted = wanted if spec.packing is None else preferred
    else:
        wanted = _DTYPES[name]
    if supported is None or wanted in supported:
        return wanted
    words = (str(dtype).removeprefix("torch.") for dtype in (wanted, preferred))
    logger.warning("The device does not serve %s: weights and KV cache are %s", *words)
    return preferred


def load_model(
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int,
    divided: DividedModel | None = None,
    *,
    round_weights: Callable[[nn.Module], None] | None = None,
) -> nn.Module:
    """Load the weights onto ``device``, in evaluation mode, with paged attention.

    Its rotary frequencies do not depend on the batch, and its rotary embeddings give real numbers.
    ``divided``: the part of a rank, of which alone the weights are read. ``round_weights`` is
    called with the model in host memory, so that the device need not hold what it replaces. Raises
    `ModelError` when weights are missing.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    has_score_head = spec.scoring is not None and not spec.scoring.token_ids
    classes: Any = AutoModelForSequenceClassification if has_score_head else AutoModelForCausalLM
    of_part = {} if divided is None else divided.loading_arguments()
    arguments: dict[str, Any] = {"config": spec.config}
    if spec.packing is not None:
        arguments = loading_arguments(spec.config, spec.packing, spec.source, divided)
    try:
        loaded: Any = classes.from_pretrained(
            spec.source,
            **arguments,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
            trust_remote_code=False,
            **of_part,
        )
    except BROKEN_FILE_ERRORS as error:
        raise ModelError(f"{spec.source} cannot be loaded: {reason_of(error)}") from error
    model, report = loaded
    is_headless = spec.is_pooling and spec.scoring is None
    _check_complete(spec, report, f"{head_name(model)}." if is_headless else None)
    layers = spec.layers
    if divided is not None:
        divided.keep(model)
        layers = divided.layers
    if has_score_head:
        model = as_scorer(model)
    elif spec.scoring is not None:
        model = keep_tokens(model, spec.scoring.token_ids)
    elif spec.is_pooling:
        check_hidden_states(model)
        remove_head(model)
    declare_layers(model, [layer.within(max_model_len) for layer in layers])
    find_state_layers(model, layers, dtype)
    pin_frequencies(model, max_model_len)
    use_real_rotary(model)
    angles = {} if device.type == "cpu" else angles_of(model, max_model_len)
    model = model.eval().requires_grad_(requires_grad=False)
    if round_weights is not None:
        round_weights(model)
    model = model.to(device)
    if angles:
        check_angles(model, max_model_len, angles)
    return model  # type: ignore[no-any-return]


def num_weight_bytes(model: nn.Module) -> int:
    """Bytes of a model's tensors."""
    tensors = (places[0][0][places[0][1]] for places in _weight_places(model))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def move_weights(model: nn.Module, device: torch.device) -> None:
    """Move a model's tensors, one after the other, each to new memory on ``device``.

    Tied weights stay tied. A tensor that is there already stays where it is.
    """
    for places in _weight_places(model):
        owner, name = places[0]
        tensor = owner[name]
        if tensor.device.type == device.type:
            continue
        moved = tensor.detach().to(device)
        if isinstance(tensor, nn.Parameter):
            moved = nn.Parameter(moved, requires_grad=False)
        for owner, name in places:
            owner[name] = moved


def _weight_places(model: nn.Module) -> list[list[tuple[dict[str, Any], str]]]:
    """Where the modules keep each tensor: dictionaries of attributes, and the names in them."""
    found: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in model.modules():
        for owner in (module._parameters, module._buffers, vars(module)):
            for name, value in owner.items():
                if isinstance(value, torch.Tensor):
                    found.setdefault(id(value), []).append((owner, name))
    return list(found.values())


def _read_packing(config: PreTrainedConfig, name: str, source: str) -> Packing | None:
    if Path(name).expanduser().is_file():
        return read_gguf_packing(Path(source))
    return read_packing(config, name)


def _read_config(source: str, name: str) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except BROKEN_FILE_ERRORS as error:
        if Path(source).is_dir():
            message = f"the config.json of {name} cannot be used"
        else:
            message = f"{name} is neither a local checkpoint nor a hub id that can be reached"
        raise ModelError(f"{message}: {reason_of(error)}") from error
    return config


def _check_decoder_only(config: PreTrainedConfig, name: str, *, is_pooling: bool) -> None:
    architectures = getattr(config, "architectures", None) or []
    if not isinstance(architectures, (list, tuple)):
        raise ModelError(
            f"the config.json of {name} cannot be used: architectures is {architectures!r} instead "
            "of a list"
        )
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    if is_pooling:
        known.update(each for each in architectures if is_headless_decoder(config, each))
        known.update(each for each in architectures if is_classifier(config, each))
    if config.is_encoder_decoder or not any(a in known for a in architectures):
        found = ", ".join(map(str, architectures)) or config.model_type
        raise ModelError(
            f"{name} is a {found}, not a decoder-only language model: serve a checkpoint of a "
            f"...ForCausalLM architecture{_remedy(config, architectures, is_pooling=is_pooling)}"
        )


def _remedy(config: PreTrainedConfig, architectures: Sequence[Any], *, is_pooling: bool) -> str:
    if is_pooling or not any(is_classifier(config, each) for each in architectures):
        return ""
    return ", or its scores with the runner pooling"


def _check_sizes(spec: ModelSpec, name: str) -> None:
    for field, size in (("vocab_size", spec.vocab_size), ("num_hidden_layers", len(spec.layers))):
        if not isinstance(size, int) or size < 1:
            raise ModelError(f"the config.json of {name} cannot be used: {field} is {size!r}")
    if not all(isinstance(token, int) for token in spec.eos_token_ids):
        raise ModelError(
            f"the generation_config.json of {name} cannot be used: eos_token_id names "
            f"{sorted(map(repr, spec.eos_token_ids))}"
        )


def _check_complete(spec: ModelSpec, report: dict[str, Any], unused: str | None) -> None:
    """Raise `ModelError` for missing weights, except those whose names begin with ``unused``."""
    missing = sorted(report.get("missing_keys") or ())
    if unused is not None:
        missing = [name for name in missing if not name.startswith(unused)]
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if missing[3:] else "")
        raise ModelError(f"{spec.source} lacks weights: {shown}")


def _eos_token_ids(source: str, config: PreTrainedConfig) -> frozenset[int]:
    """End-of-sequence tokens: from the generation config if it has them, else the model config."""
    try:
        eos = GenerationConfig.from_pretrained(source).eos_token_id
    except BROKEN_FILE_ERRORS as error:
        if (Path(source) / "generation_config.json").exists():
            logger.warning("generation_config.json is ignored: %s", reason_of(error))
        eos = None
    if eos is None:
        eos = config.eos_token_id
    if eos is None:
        return frozenset()
    return frozenset(eos) if isinstance(eos, (list, tuple)) else frozenset((eos,))
