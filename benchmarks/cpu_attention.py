"""Time of attention of one layer on the CPU: the kernels beside PyTorch's operations.

    python benchmarks/cpu_attention.py [--threads N]

All compute the same 30 layers in turns, so that keys and values come from memory as in a model, in
bf16 with the heads of SmolLM2-135M (9 query heads, 3 KV heads of 64) and blocks of 32 tokens.
Figures are medians of 12 turns for one layer; of decode, also the keys and values that the kernel
reads per second.
"""

from __future__ import annotations

import argparse
import statistics
import time

import attrs
import torch
from rich.console import Console
from rich.table import Table

from trencadis.engine.devices.cpu.attention import CPUAttention, attention_kernel
from trencadis.engine.models.layer_spec import LayerSpec
from trencadis.engine.models.paged_context import (
    MASKED,
    DecodeContext,
    PagedContext,
    RaggedChunk,
    RaggedContext,
)

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 32
SPEC = LayerSpec(
    **{"heads": HEADS, "kv_heads": KV_HEADS, "scale": HEAD_DIM**-0.5},
    **{"key_width": HEAD_DIM, "value_width": HEAD_DIM},
)
LAYERS = 30
TURNS = 12
LOADS = ((32, 288), (32, 128), (8, 512), (1, 1024), (1, 64))
"""Sequences, and tokens of context of each."""

CHUNKS = ((4, 128, 0), (1, 256, 0), (1, 512, 0), (1, 512, 1536))
"""Prefill chunks of a step, and tokens and context tokens of each."""


@attrs.frozen(eq=False)
class Cache:
    """The KV cache of all layers, ``[layers, 2, blocks, K, S, D]``."""

    held: torch.Tensor
    block_size: int = BLOCK_SIZE

    @classmethod
    def of(cls, blocks: int) -> Cache:
        one = torch.randn(2, blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM).bfloat16()
        return cls(one.repeat(LAYERS, 1, 1, 1, 1, 1))

    def key(self, layer: int) -> torch.Tensor:
        return self.held[layer, 0]

    def value(self, layer: int) -> torch.Tensor:
        return self.held[layer, 1]


def make_batch(batch: int, context: int) -> DecodeContext:
    """Sequences with ``context`` tokens, whose blocks are shuffled."""
    per_sequence = -(-context // BLOCK_SIZE)
    blocks = 1 + batch * per_sequence
    owners = torch.full((blocks,), batch)
    shuffled = 1 + torch.randperm(blocks - 1).view(batch, per_sequence)
    owners[shuffled] = torch.arange(batch)[:, None]
    bias = torch.zeros(blocks, 1, 1, BLOCK_SIZE)
    last = (context - 1) % BLOCK_SIZE
    bias[shuffled[:, -1], ..., last + 1 :] = MASKED
    return DecodeContext(
        *(Cache.of(blocks), blocks, shuffled[:, -1], torch.full((batch,), last)),
        *(owners, owners.clamp_max(batch - 1), bias),
    )


def make_chunks(count: int, tokens: int, context: int) -> RaggedContext:
    """Chunks of sequences whose blocks are shuffled."""
    per_sequence = -(-(context + tokens) // BLOCK_SIZE)
    tables = 1 + torch.randperm(count * per_sequence).view(count, per_sequence)
    positions = torch.arange(context, context + tokens)
    mask = torch.ones(tokens, context + tokens, dtype=torch.bool).tril_(context)
    held_blocks = -(-context // BLOCK_SIZE)
    chunks = tuple(
        RaggedChunk(
            number * tokens,
            (number + 1) * tokens,
            tables[number, :held_blocks] if context else None,
            mask if context else None,
        )
        for number in range(count)
    )
    return RaggedContext(
        Cache.of(1 + count * per_sequence),
        tables[:, positions // BLOCK_SIZE].flatten(),
        (positions % BLOCK_SIZE).repeat(count),
        chunks,
    )


def measure(paged: PagedContext, tokens: int, attentions: list[CPUAttention]) -> list[float]:
    """Median seconds of each for a layer."""
    heads = (HEADS, KV_HEADS, KV_HEADS)
    # As a linear layer leaves them: the heads of a token are adjacent.
    tensors = [torch.randn(1, tokens, n, HEAD_DIM).bfloat16().transpose(1, 2) for n in heads]
    seconds: list[list[float]] = [[] for _ in attentions]
    for _ in range(TURNS):
        for times, attention in zip(seconds, attentions, strict=True):
            start = time.perf_counter()
            for layer in range(LAYERS):
                attention.attend(*tensors, layer, paged, SPEC)
            times.append((time.perf_counter() - start) / LAYERS)
    return [statistics.median(times) for times in seconds]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    torch.set_num_threads(parser.parse_args().threads)
    torch.manual_seed(0)
    kernel = attention_kernel(HEADS, KV_HEADS, HEAD_DIM, torch.bfloat16)
    both = [CPUAttention(), CPUAttention(kernel)]
    console = Console(width=100)
    table = Table("sequences", "context", "operations", "kernel", "ratio", "read by the kernel")
    for batch, context in LOADS:
        operations, own = measure(make_batch(batch, context), batch, both)
        bytes_read = 2 * 2 * batch * context * KV_HEADS * HEAD_DIM
        table.add_row(
            *(str(batch), str(context), f"{operations * 1e6:,.0f} µs", f"{own * 1e6:,.0f} µs"),
            *(f"{operations / own:.1f}", f"{bytes_read / own / 1e9:.1f} GB/s"),
        )
    console.print(table)
    ways = [*both, CPUAttention(attrs.evolve(kernel, widens=True))]
    table = Table(
        *("chunks", "tokens of each", "context", "operations", "kernel, pairs of bf16"),
        *("kernel, fp32", "ratio of the faster"),
    )
    for count, tokens, context in CHUNKS:
        operations, *own = measure(make_chunks(count, tokens, context), count * tokens, ways)
        table.add_row(
            *(str(count), str(tokens), str(context), f"{operations * 1e6:,.0f} µs"),
            *(f"{seconds * 1e6:,.0f} µs" for seconds in own),
            f"{operations / min(own):.1f}",
        )
    console.print(table)
    console.print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")


if __name__ == "__main__":
    main()
