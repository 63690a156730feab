"""Thousands of random grids, each against brute force: what a server with these limits meets."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from trencadis.bucketing import (
    AxisConfig,
    BucketGrid,
    BucketingConfig,
    BucketingError,
    TrafficRecorder,
    decode_grid,
    prompt_grid,
    read_bucket_file,
    sequence_grid,
    write_bucket_file,
)
from trencadis.bucketing.strategies import STRATEGIES

GRIDS, SOAK_GRIDS = 120, 20_000

Shape = tuple[int, ...]
Limits = dict[str, int]


def axis_config(draw: random.Random) -> AxisConfig:
    def maybe(least: int, most: int) -> int | None:
        return draw.choice([None, draw.randint(least, most)])

    return AxisConfig(
        min=maybe(0, 6),
        step=maybe(1, 8),
        max=maybe(6, 60),
        limit=maybe(1, 12),
        pad_max=maybe(0, 20),
        pad_percent=maybe(0, 50),
    )


def recorded(draw: random.Random, axes: tuple[str, ...]) -> TrafficRecorder:
    traffic = TrafficRecorder(axes)
    traffic.record([1] * len(axes))
    for _ in range(draw.randint(0, 12)):
        traffic.record([draw.randint(0, 12) for _ in axes], draw.randint(0, 9))
    return traffic


class Server:
    """Random settings and limits, and the grids that they make."""

    def __init__(self, draw: random.Random) -> None:
        fields = ("prompt_batch", "prompt_query", "prompt_context", "decode_batch", "decode_blocks")
        some = draw.sample(fields, draw.randint(0, 5))
        self.config = BucketingConfig(
            strategy=draw.choice(list(STRATEGIES)),
            contiguous_pa=draw.random() < 0.5,
            **{name: axis_config(draw) for name in some},
        )
        self.limits: Limits = {
            "max_model_len": draw.randint(1, 40),
            "max_num_batched_tokens": draw.randint(1, 60),
            "max_num_seqs": draw.randint(1, 9),
            "block_size": draw.randint(1, 9),
        }
        self.num_blocks = draw.randint(1, 40)
        self.prompt_traffic = recorded(draw, ("batch", "query", "context_blocks"))
        self.decode_traffic = recorded(draw, ("batch", "blocks"))

    def prompt(self, config: BucketingConfig | None = None) -> BucketGrid:
        return prompt_grid(config or self.config, traffic=self.prompt_traffic, **self.limits)

    def decode(self, config: BucketingConfig | None = None) -> BucketGrid:
        limits = {name: n for name, n in self.limits.items() if name != "max_num_batched_tokens"}
        return decode_grid(
            config or self.config, num_blocks=self.num_blocks, traffic=self.decode_traffic, **limits
        )

    def prompt_shapes(self) -> Iterator[Shape]:
        """Every prompt shape that the limits allow, without padding."""
        longest = min(self.limits["max_model_len"], self.limits["max_num_batched_tokens"])
        for batch in range(1, self.limits["max_num_seqs"] + 1):
            for query in range(1, longest + 1):
                if batch > 1 and batch * query > self.limits["max_num_batched_tokens"]:
                    break
                most = math.ceil((self.limits["max_model_len"] - query) / self.limits["block_size"])
                for context in range(most + 1):
                    yield (batch, query, context)

    def decode_shapes(self) -> Iterator[Shape]:
        per_sequence = math.ceil(self.limits["max_model_len"] / self.limits["block_size"])
        for batch in range(1, self.limits["max_num_seqs"] + 1):
            if self.config.contiguous_pa:
                yield from ((batch, blocks) for blocks in range(1, self.num_blocks + 1))
            else:
                most = min(batch * per_sequence, 3 * self.num_blocks)
                yield from ((batch, blocks) for blocks in range(batch, most + 1))


def at_least(bucket: Shape, shape: Shape) -> bool:
    return all(size >= need for size, need in zip(bucket, shape, strict=True))


def check_finds(grid: BucketGrid, shapes: list[Shape], draw: random.Random) -> None:
    """The cheapest bucket that is large enough, monotone; fallbacks; padding."""
    for shape in draw.sample(shapes, min(12, len(shapes))):
        found = grid.find(shape)
        large = [bucket for bucket in grid if at_least(bucket.shape, shape)]
        assert (found is None) == (not large), (shape, found)
        if found is not None:
            assert found in large
            least = min(grid._cost(bucket) for bucket in large)
            assert grid._cost(found) == least, (shape, found)
        assert grid.padding(shape) >= 0
        fallback = grid.fallback(shape)
        assert at_least(fallback.shape, shape)
        assert grid.fallback(fallback.shape) == fallback
        larger = tuple(size + draw.choice([0, 0, 1, 5, 1000]) for size in shape)
        assert at_least(grid.fallback(larger).shape, fallback.shape)
        wider = grid.find(larger)
        if wider is not None:
            assert found is not None, (shape, larger)
            assert grid._cost(found) <= grid._cost(wider), (shape, larger)


def check_coverage(grid: BucketGrid, shapes: list[Shape]) -> None:
    """A shape has a bucket or is within a gap, and a gap holds no shape with a bucket."""
    gaps = grid.coverage_gaps()
    for shape in shapes:
        in_gap = any(at_least(gap.high, shape) and at_least(shape, gap.low) for gap in gaps)
        assert (grid.find(shape) is None) == in_gap, (shape, gaps)


def check_prompts(server: Server, grid: BucketGrid, draw: random.Random) -> None:
    shapes = list(server.prompt_shapes())
    alone = [shape for shape in shapes if shape[0] == 1]
    check_coverage(grid, alone)
    check_finds(grid, shapes, draw)
    budget = server.limits["max_num_batched_tokens"]
    ends = [grid.values(axis)[-1] for axis in grid.axes]
    for shape in draw.sample(shapes, min(40, len(shapes))):
        found = grid.find(shape)
        if found is not None:
            # Within the budget with its padding, or a bucket for one prompt.
            assert found["batch"] * found["query"] <= budget or found["batch"] == 1
        elif at_least(tuple(ends), shape) and not grid.coverage_gaps():
            sizes = [
                next(v for v in grid.values(a) if v >= n)
                for a, n in zip(grid.axes, shape, strict=True)
            ]
            assert sizes[0] * sizes[1] > budget, "only the budget leaves a batch without a bucket"


def check_file(server: Server, folder: Path, draw: random.Random) -> None:
    """Both grids survive their file; a part of a file has its gaps told."""
    prompt, decode = server.prompt(), server.decode()
    path = folder / "buckets.txt"
    config = BucketingConfig(bucket_file=str(path), contiguous_pa=server.config.contiguous_pa)
    write_bucket_file(path, prompt=prompt, decode=decode)
    listed = read_bucket_file(path)
    assert list(listed.prompt) == [bucket.shape for bucket in prompt]
    assert list(listed.decode) == [bucket.shape for bucket in decode]
    assert server.prompt(config).buckets == prompt.buckets
    assert server.decode(config).buckets == decode.buckets
    parts = [draw.sample(grid.buckets, draw.randint(1, len(grid))) for grid in (prompt, decode)]
    write_bucket_file(path, prompt=parts[0], decode=parts[1])
    part = server.prompt(config)
    given, budget = {b.shape for b in parts[0]}, server.limits["max_num_batched_tokens"]
    alone = {(1, query, context) for batch, query, context in given if batch * query > budget}
    assert {bucket.shape for bucket in part} <= given | alone
    check_prompts(server, part, draw)
    part = server.decode(config)
    assert set(part.buckets) <= set(parts[1])
    check_coverage(part, list(server.decode_shapes()))


def check_server(seed: int, folder: Path) -> int:
    """Check all grids of one random server; returns how many there are."""
    draw = random.Random(seed)
    server = Server(draw)
    try:
        prompt, decode = server.prompt(), server.decode()
    except BucketingError as error:
        assert "no recorded shape is within the limits" in str(error)  # of traffic for fit
        return 0
    check_prompts(server, prompt, draw)
    shapes = list(server.decode_shapes())
    check_coverage(decode, shapes)
    if shapes:
        check_finds(decode, shapes, draw)
    # No bucket is prepared that no batch is padded to.
    for grid, own in ((prompt, server.prompt_shapes()), (decode, iter(shapes))):
        assert set(grid) <= set(map(grid.find, own))
    # Without a maximum of the user's, nothing is missing.
    for grid, fields in (
        (prompt, ("prompt_batch", "prompt_query", "prompt_context")),
        (decode, ("decode_batch", "decode_blocks")),
    ):
        if all(getattr(server.config, field).max is None for field in fields):
            assert grid.coverage_gaps() == ()
    limits = {name: server.limits[name] for name in ("max_num_seqs", "max_model_len", "block_size")}
    if server.config.strategy != "fit":
        sequences = sequence_grid("decode", server.config, **limits)
        check_coverage(
            sequences,
            [
                *itertools.product(
                    *(range(1, limits[n] + 1) for n in ("max_num_seqs", "max_model_len"))
                )
            ],
        )
    check_file(server, folder, draw)
    return 5


def check_grids(folder: Path, count: int) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    checked = 0
    while checked < count:
        try:
            checked += check_server(seed, folder)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        seed += 1


def test_random_grids_keep_what_they_promise(tmp_path: Path) -> None:
    check_grids(tmp_path, GRIDS)


@pytest.mark.soak
def test_twenty_thousand_random_grids_keep_what_they_promise(tmp_path: Path) -> None:
    check_grids(tmp_path, SOAK_GRIDS)
