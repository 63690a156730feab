"""Tiny random checkpoints of model families: what `test_model_page.py` serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

MAX_MODEL_LEN = 64
WINDOW = 32

SIZES: dict[str, Any] = {
    **{"vocab_size": 258, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"max_position_embeddings": 256, "bos_token_id": 256, "eos_token_id": 257},
    **{"pad_token_id": None, "tie_word_embeddings": False, "initializer_range": 0.3},
}
EXPERTS = {
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 32},
}
LATENT = {
    **{"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 8},
    **{"qk_nope_head_dim": 16, "v_head_dim": 8, "head_dim": 8, "first_k_dense_replace": 1},
    **{"n_group": 1, "topk_group": 1, "topk_method": "greedy", "n_shared_experts": 1},
}
STATE = {
    **{"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1},
    **{"mamba_chunk_size": 16, "mamba_expand": 2, "state_size": 8},
}
NARROW_STATE = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
}
MIXED_TYPES = ["linear_attention", "full_attention"] * 2
KIMI = {
    **LATENT,
    **EXPERTS,
    **{"layer_types": MIXED_TYPES, "linear_num_heads": 4, "linear_head_dim": 16},
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Apertus": ("apertus", {}),
    "Bailing hybrid (Ling)": ("bailing_hybrid", KIMI),
    "Bamba": ("bamba", {**STATE, "attn_layer_indices": [1, 3]}),
    "Cohere (Command R)": ("cohere", {}),
    "Cohere 2 (Command R7B)": ("cohere2", {"sliding_window": WINDOW}),
    "DeepSeek V2": ("deepseek_v2", {**LATENT, **EXPERTS}),
    "DeepSeek V3": ("deepseek_v3", {**LATENT, **EXPERTS}),
    "DiffLlama": ("diffllama", {}),
    "Doge": ("doge", {}),
    "ERNIE 4.5": ("ernie4_5", {}),
    "EXAONE 4": ("exaone4", {"sliding_window": WINDOW, "sliding_window_pattern": 2}),
    "Falcon": ("falcon", {"head_dim": ...}),
    "Falcon Mamba": ("falcon_mamba", {}),
    "Falcon-H1": ("falcon_h1", {**STATE, "mamba_d_ssm": 128}),
    "Gemma": ("gemma", {}),
    "Gemma 2": ("gemma2", {"sliding_window": WINDOW, "query_pre_attn_scalar": 16}),
    "Gemma 3 (text)": (
        "gemma3_text",
        {"sliding_window": WINDOW, "query_pre_attn_scalar": 16, "sliding_window_pattern": 2},
    ),
    "Gemma 3 (text), within its window": (
        "gemma3_text",
        {"sliding_window": MAX_MODEL_LEN, "query_pre_attn_scalar": 16},
    ),
    "GLM-4": ("glm4", {}),
    "GLM-4.5 (MoE)": ("glm4_moe", {**EXPERTS, "first_k_dense_replace": 1, "n_group": 1}),
    "GPT-2": ("gpt2", {}),
    "gpt-oss": ("gpt_oss", {**EXPERTS, "sliding_window": WINDOW}),
    "Granite 3": ("granite", {"attention_multiplier": 0.2, "residual_multiplier": 0.7}),
    "Granite 3 (MoE)": ("granitemoe", EXPERTS),
    "Granite 4 (hybrid)": ("granitemoehybrid", {**STATE, **EXPERTS, "layer_types": MIXED_TYPES}),
    "Jamba": ("jamba", {**EXPERTS, "attn_layer_offset": 1, "attn_layer_period": 2}),
    "Kimi Linear": ("kimi_linear", KIMI),
    "LFM 2": ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
    "LFM 2 (MoE)": (
        "lfm2_moe",
        {**EXPERTS, "layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    ),
    "LFM 3": ("lfm3", {**EXPERTS, "layer_types": ["conv", "full_attention"] * 2}),
    "Llama": ("llama", {}),
    "Llama 4 (text)": (
        "llama4_text",
        {
            **{**EXPERTS, "attention_chunk_size": WINDOW, "intermediate_size_mlp": 64},
            **{"attn_scale": 2.0, "floor_scale": 8},  # so that short prompts reach several steps
        },
    ),
    "Llama 4 (text), within a chunk": (
        "llama4_text",
        {**EXPERTS, "attention_chunk_size": MAX_MODEL_LEN, "intermediate_size_mlp": 64},
    ),
    "Mamba": ("mamba", {}),
    "Mamba 2": (
        "mamba2",
        {"num_heads": 8, "head_dim": 16, "expand": 2, "state_size": 8, "chunk_size": 16},
    ),
    "MiniCPM 3": ("minicpm3", {**LATENT, "head_dim": None}),
    "Mistral v0.1": ("mistral", {"sliding_window": WINDOW}),
    "Mistral v0.1, within its window": ("mistral", {"sliding_window": MAX_MODEL_LEN}),
    "Mistral": ("mistral", {"sliding_window": None}),
    "Mixtral": ("mixtral", EXPERTS),
    "Nemotron": ("nemotron", {}),
    "Nemotron-H": (
        "nemotron_h",
        {**STATE, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1}
        | {"layers_block_type": ["mamba", "attention", "mamba", "mlp"]},
    ),
    "OLMo 2": ("olmo2", {}),
    "OLMo 3": ("olmo3", {"sliding_window": WINDOW}),
    "OLMoE": ("olmoe", EXPERTS),
    "OLMo hybrid": ("olmo_hybrid", {}),
    "OPT": ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 64}),
    "Phi-3": ("phi3", {"pad_token_id": 0}),
    "Qwen 2": ("qwen2", {}),
    "Qwen 2 with use_sliding_window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "Qwen 3": ("qwen3", {}),
    "Qwen 3 (MoE)": ("qwen3_moe", EXPERTS),
    "Qwen 3 Next": ("qwen3_next", {**EXPERTS, **NARROW_STATE, "layer_types": MIXED_TYPES}),
    "Qwen 3.5 (text)": ("qwen3_5_text", NARROW_STATE),
    "Qwen 3.5 (MoE, text)": (
        "qwen3_5_moe_text",
        {**EXPERTS, **NARROW_STATE, "shared_expert_intermediate_size": 32},
    ),
    "Seed-OSS": ("seed_oss", {}),
    "SmolLM 3": ("smollm3", {"no_rope_layers": [1, 1, 1, 0]}),
    "StarCoder 2": ("starcoder2", {}),
}
"""The name on the page, transformers' type of the model, and what its configuration says besides
`SIZES`; an ellipsis for what it does not say."""


def save_family(name: str, directory: Path, **others: Any) -> Path:
    """A checkpoint of a family in fp32, without a tokenizer. ``others``: changes of its sizes."""
    model_type, changes = FAMILIES[name]
    torch.manual_seed(0)
    changes = changes | others
    settings = {name: value for name, value in (SIZES | changes).items() if value is not ...}
    config = AutoConfig.for_model(model_type, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():  # of a size that makes tokens depend on all before them
        if weight.dim() > 1:
            weight.data.normal_(std=0.3, generator=generator)
    model.save_pretrained(directory)
    return directory
