"""A model that calls tools: trained on the very conversations of vLLM's tests, and on nothing else.

It stands in for the models that those tests download. It knows what to answer to these prompts
alone, so that a test of them says nothing about a model; it says that the chat template reached
the model as it was trained with, and that the server parsed and streamed what the model wrote.

It has the first layers of the small model as they are, and a head of its own: a softmax regression
from their hidden states to the tokens of the answers. That is convex, so the same head is found
each time, in about a minute of one core. The checkpoint is kept beside vLLM's sources, under a name
made of all that it depends on.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from conversations import Conversation
from reference_model import kept_model
from torch.nn import functional as F
from transformers import AutoTokenizer, LlamaForCausalLM

LAYERS = 12
SURE = 0.95
"""Least probability of each token of an answer: requests may sample."""

ITERATIONS = 20
MOST_TURNS = 50
"""Of so many iterations each, after which the head is looked at."""


@attrs.frozen
class Example:
    """A prompt and its answer, which ends with the token that ends a turn."""

    prompt: list[int]
    answer: list[int]


def trained_model(base: str, conversations: Sequence[Conversation], directory: Path) -> str:
    """The directory of the model for these conversations, trained unless it is there.

    ``base``: the checkpoint whose layers and tokenizer it has. Raises `RuntimeError` where its
    hidden states do not tell the answers apart.
    """
    tokenizer = AutoTokenizer.from_pretrained(base)
    examples = _examples(tokenizer, conversations)
    content = json.dumps([Path(base).name, LAYERS, SURE, *map(attrs.astuple, examples)])
    target = directory / f"trained-{hashlib.sha256(content.encode()).hexdigest()[:12]}"
    return kept_model(target, tokenizer, lambda: _trained(base, examples))


def _examples(tokenizer: Any, conversations: Sequence[Conversation]) -> list[Example]:
    answers: dict[str, str] = {}
    for conversation in conversations:
        prompt = conversation.prompt(tokenizer)
        known = answers.setdefault(prompt, conversation.answer)
        assert known == conversation.answer, f"two answers to {prompt[-300:]}"

    def encoded(text: str) -> list[int]:
        token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return token_ids

    ends = [tokenizer.eos_token_id]
    return [Example(encoded(prompt), encoded(answer) + ends) for prompt, answer in answers.items()]


@torch.no_grad()
def _trained(base: str, examples: list[Example]) -> LlamaForCausalLM:
    model = LlamaForCausalLM.from_pretrained(
        base, num_hidden_layers=LAYERS, tie_word_embeddings=False, dtype=torch.float32
    ).eval()
    hidden = torch.cat([_where_written(model, example) for example in examples])
    # Values of about the same size make the regression converge in few iterations.
    sizes = hidden.pow(2).mean(0).sqrt()
    model.model.norm.weight /= sizes
    tokens = torch.tensor([token for example in examples for token in example.answer])
    used, wanted = tokens.unique(return_inverse=True)
    rows = _head(hidden / sizes, wanted, model.config.vocab_size - len(used))
    model.lm_head.weight[:] = rows[-1]
    model.lm_head.weight[used] = rows[:-1]
    if wrong := _wrong(model, examples):
        raise RuntimeError(f"{len(wrong)} of {len(examples)} answers are not as trained: {wrong}")
    return model


def _where_written(model: LlamaForCausalLM, example: Example) -> torch.Tensor:
    """The hidden states, [tokens of the answer, hidden size], that each token is drawn from."""
    tokens = torch.tensor([example.prompt + example.answer[:-1]])
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    return hidden[0, len(example.prompt) - 1 :]


@torch.enable_grad()
def _head(hidden: torch.Tensor, wanted: torch.Tensor, others: int) -> torch.Tensor:
    """The head's row of each token that answers have, last the one that all ``others`` share."""
    rows = torch.zeros(int(wanted.max()) + 2, hidden.shape[1], requires_grad=True)
    several = torch.zeros(len(rows))
    several[-1] = math.log(others)
    optimizer = torch.optim.LBFGS(
        [rows], lr=1, max_iter=ITERATIONS, history_size=ITERATIONS, line_search_fn="strong_wolfe"
    )

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(hidden @ rows.T + several, wanted)
        value.backward()
        return value

    for _ in range(MOST_TURNS):
        optimizer.step(loss)
        chances = (hidden @ rows.T + several).detach().softmax(-1)
        least = chances.gather(-1, wanted[:, None]).min()
        if least > SURE:
            return rows.detach()
    raise RuntimeError(f"a token of an answer has a probability of {least:.3f}, not {SURE}")


def _wrong(model: LlamaForCausalLM, examples: Sequence[Example]) -> list[int]:
    """The places of the examples whose answer transformers' greedy `generate` does not give."""
    found = []
    for place, example in enumerate(examples):
        prompt = torch.tensor([example.prompt])
        length = len(example.answer)
        whole = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=length,
            pad_token_id=model.config.eos_token_id,
        )
        if whole[0, len(example.prompt) :].tolist() != example.answer:
            found.append(place)
    return found
