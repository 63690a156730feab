"""A small model of random weights with a tokenizer that is trained on the prompts of the tests."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PROMPTS: list[str] = json.loads((Path(__file__).parent / "prompts.json").read_text())


def save_trained_model(directory: Path) -> Path:
    """A Llama that differs from SmolLM2 and from the tiny model in every dimension."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=["<bos>", "<eos>"], initial_alphabet=sorted(alphabet)
    )
    tokenizer.train_from_iterator(PROMPTS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")
    fast.save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.5,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory
