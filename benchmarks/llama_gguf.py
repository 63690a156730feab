"""A Llama checkpoint as a GGUF file with the same weights, for llama.cpp and OpenVINO.

llama.cpp's own converter is a script of its repository that no package brings. Of the tokenizer it
has what OpenVINO asks for: the benchmarks give token IDs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

OF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OF_MODEL = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
"""Names in GGUF by names in the checkpoint, without prefix and ``.weight``."""


def write_gguf(checkpoint: str, path: Path, matrices: gguf.GGMLQuantizationType) -> None:
    """Write a checkpoint of architecture Llama with matrices of this type, and norms in fp32."""
    config = json.loads((Path(checkpoint) / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(int(gguf.LlamaFileType[f"MOSTLY_{matrices.name}"]))
    _add_tokenizer(writer, Path(checkpoint), config)
    for name, tensor in load_file(Path(checkpoint) / "model.safetensors").items():
        weights = tensor.float()
        if "q_proj" in name or "k_proj" in name:
            weights = _interleaved(weights, heads if "q_proj" in name else kv_heads)
        kind = matrices if weights.ndim > 1 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(weights.numpy().astype(np.float32), kind)
        writer.add_tensor(_gguf_name(name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, checkpoint: Path, config: dict[str, Any]) -> None:
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text("utf-8"))
    tokens = {number: token for token, number in tokenizer["model"]["vocab"].items()}
    control = {each["id"]: each["content"] for each in tokenizer["added_tokens"]}
    tokens |= control
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([tokens[number] for number in range(len(tokens))])
    kinds = (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL)
    writer.add_token_types([kinds[number in control] for number in range(len(tokens))])
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])


def _interleaved(weights: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows in the order of llama.cpp's rotary embedding, which rotates neighbours.

    Transformers rotates element i with element i + head_size / 2.
    """
    rows, columns = weights.shape
    halves = weights.reshape(heads, 2, rows // heads // 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns)


def _gguf_name(name: str) -> str:
    name = name.removeprefix("model.").removesuffix(".weight")
    if not name.startswith("layers."):
        return f"{OF_MODEL[name]}.weight"
    _, layer, part = name.split(".", 2)
    return f"blk.{layer}.{OF_LAYER[part]}.weight"
