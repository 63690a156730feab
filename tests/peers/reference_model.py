"""What vLLM's tests of embeddings and scores compare a server with: transformers.

It computes those of the model that is served, whose name a test takes for another's.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.nn import functional as F
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
)

TOLERANCE = 1e-3

QUICK = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8192,
    "pad_token_id": None,
}


class HfRunner:
    """The class of `tests/conftest.py` of vLLM, as far as tests of a server use it.

    Embeddings are of the last token and have length 1; scores are of a query and a document, one
    after the other.
    """

    base: ClassVar[str]
    """The directory of the small model."""

    def __init__(self, name: str, *, is_cross_encoder: bool = False, **options: object) -> None:
        kind: Any = LlamaForSequenceClassification if is_cross_encoder else LlamaModel
        directory = reranker(self.base) if is_cross_encoder else self.base
        self._model = kind.from_pretrained(directory, dtype=torch.float32).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(directory)

    def __enter__(self) -> HfRunner:
        return self

    def __exit__(self, *exception: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        pytest.skip(f"needs the {name} of vLLM's HfRunner")

    @torch.inference_mode()
    def encode(self, texts: list[str]) -> list[list[float]]:
        return [
            F.normalize(self._run(text).last_hidden_state[0, -1], dim=-1).tolist() for text in texts
        ]

    @torch.inference_mode()
    def predict(self, pairs: list[list[str]], *args: object, **options: object) -> torch.Tensor:
        logits = [self._run("".join(pair)).logits[0, 0] for pair in pairs]
        return torch.stack(logits).sigmoid()

    def _run(self, text: str) -> Any:
        return self._model(**self._tokenizer(text, return_tensors="pt"))


def reranker(base: str) -> str:
    """The directory of a model with the layers of another and a random score head."""
    tokenizer = AutoTokenizer.from_pretrained(base)

    def make() -> LlamaForSequenceClassification:
        torch.manual_seed(0)
        model = LlamaForSequenceClassification.from_pretrained(base, num_labels=1)
        model.config.pad_token_id = tokenizer.pad_token_id
        return model

    return kept_model(Path.cwd().parent / "reranker", tokenizer, make)


def quick_model(base: str) -> str:
    """The directory of a random model so small that a server writes 2,048 tokens in seconds."""

    def make() -> LlamaForCausalLM:
        torch.manual_seed(0)
        tokens = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **tokens, **QUICK))

    tokenizer = AutoTokenizer.from_pretrained(base)
    return kept_model(Path.cwd().parent / "quick", tokenizer, make)


def kept_model(target: Path, tokenizer: Any, make: Callable[[], Any]) -> str:
    """The directory ``target`` with the model that ``make`` returns, unless one is there."""
    if not target.exists():
        model = make()
        partial = target.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.rename(target)
    return str(target)


def check_embeddings_close(
    *, embeddings_0_lst: Any, embeddings_1_lst: Any, tol: float = TOLERANCE, **names: str
) -> None:
    for pair in zip(embeddings_0_lst, embeddings_1_lst, strict=True):
        first, second = map(torch.tensor, pair)
        assert F.cosine_similarity(first, second, dim=0) > 1 - tol, names


def float_embeddings(response: Any) -> list[list[float]]:
    return [item.embedding for item in response.data]


def run_embedding_correctness_test(model: HfRunner, inputs: list[str], outputs: Any) -> None:
    check_embeddings_close(embeddings_0_lst=model.encode(inputs), embeddings_1_lst=outputs)
