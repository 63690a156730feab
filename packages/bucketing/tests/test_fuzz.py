"""Random calls of the public API, right and wrong: only `BucketingError` leaves, without effect.

Each run is random and repeatable: its seed is in the message of a failure.
"""

from __future__ import annotations

import math
import random
import signal
import string
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trencadis.bucketing as api
from trencadis.bucketing import (
    AxisConfig,
    Bucket,
    BucketGrid,
    BucketingConfig,
    BucketingError,
    Trace,
    TrafficRecorder,
)
from trencadis.bucketing.strategies import STRATEGIES

CALLS, SOAK_CALLS = 1_500, 100_000

RULES = [name for name, strategy in STRATEGIES.items() if strategy.fit is None]
"""The strategies that need no traffic."""
LIMIT_S = 60
"""No call takes this long, on any machine; the slowest take milliseconds."""

AXES = ("batch", "query", "context_blocks")


class Odd:
    """An object that no argument can be, and that cannot even be printed."""

    def __repr__(self) -> str:
        raise ValueError("no text")


def wrong_value(draw: random.Random) -> Any:
    """A value that is wrong for most arguments."""
    return draw.choice(
        [
            *(None, True, -1, 0, 1 << 41, 1 << 63, -(1 << 70), 10**5000, -(10**5000)),
            *(0.5, -0.0, 1e400, -math.inf, math.nan, 1j, Fraction(1, 3), "", "ab", "1", b"x"),
            *([], [[]], [1, [2]], [None], [10**5000], (1, 2), (1, 2, 3, 4), {}, {"a": 1}, {1: []}),
            *(set(), range(3), range(10**12), np.array([1, 2]), np.array(["a"]), np.float32(2.5)),
            *(np.array([[1.5]]), np.array([None]), np.int64(3), object(), Odd()),
            *(lambda *_: None, lambda *_: "x", lambda *_: 1.0, iter([1, 2]), "\ud800", "a\0b"),
        ]
    )


Arguments = dict[str, Any]
Call = tuple[Callable[..., Any], Arguments]


def small(draw: random.Random, least: int = 1, most: int = 40) -> int:
    return draw.randint(least, most)


def shape(draw: random.Random, axes: int = 3) -> tuple[int, ...]:
    return tuple(small(draw, 0) for _ in range(axes))


def axis_config(draw: random.Random) -> AxisConfig:
    return AxisConfig(step=draw.choice([None, small(draw)]), max=draw.choice([None, small(draw)]))


def config(draw: random.Random) -> BucketingConfig:
    return BucketingConfig(
        strategy=draw.choice(RULES),
        prompt_query=axis_config(draw),
        decode_batch=axis_config(draw),
        contiguous_pa=draw.random() < 0.5,
    )


def grid(draw: random.Random) -> BucketGrid:
    axes = {name: sorted({small(draw, 0) for _ in range(small(draw, 1, 4))}) for name in AXES}
    return BucketGrid(axes, phase="prompt")


def rows(draw: random.Random) -> list[list[int]]:
    return [[small(draw), small(draw)] for _ in range(small(draw))]


class World:
    """What the calls share: a folder of files, a recorder, a grid."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self.folder = folder
        self.recorder = TrafficRecorder(AXES, capacity=64)
        self.recorder.record((1, 2, 3))
        self.grid = grid(draw)
        self.trace = Trace([3, 9, 4], [0.0, 0.5, 9.0])  # type: ignore[arg-type]

    def state(self) -> tuple[Any, ...]:
        shapes, counts = self.recorder.shapes()
        return (
            *(self.recorder.axes, self.recorder.resolution, self.recorder.total),
            *(shapes.tolist(), counts.tolist(), self.grid.buckets),
            self.trace.lengths.tolist(),
            {path.name: path.read_bytes() for path in self.folder.iterdir()},
        )

    def text_file(self, draw: random.Random, suffix: str) -> str:
        """A file that is right, but for a few bytes."""
        right = {
            ".txt": b"# All\n([1, 2], [16, 32], range(0, 9, 4))\nprompt (1, 1, 0)\n(8, 1, 64)\n",
            ".csv": b"arrival,length\n0.5,12\n2023-11-16 18:17:03.9799600,40\n",
            ".jsonl": b'{"timestamp": 1, "input_length": 7}\n\n{"input_length": 3}\n',
            ".json": b'{"axes": ["a", "b"], "capacity": 9, "resolution": [1, 2],\n'
            b'"counts": [[1, 2, 3], [4, 6, 1]]}\n',
        }
        content = bytearray(right[suffix])
        for _ in range(draw.choice([0, 1, 1, 2, 8])):
            place = draw.randrange(len(content))
            odd = draw.choice([b"", b"9" * 30, b"1e400", b"NaN", b"-", b"[", b"\xff", b"\0", b"\n"])
            content[place : place + draw.randrange(3)] = odd
        path = self.folder / f"file{suffix}"
        path.write_bytes(bytes(content))
        return str(path)

    def call(self, draw: random.Random) -> Call:
        """A right call of the public API."""
        serving = {"max_num_seqs": small(draw), "max_model_len": small(draw, 1, 200)}
        serving["block_size"] = small(draw)
        range_of = {"min": small(draw, 0), "step": small(draw), "max": small(draw, 40, 400)}
        fit = {"weights": None, "tail": draw.choice([0, 0.5, 9.0])}
        environ = {
            "".join(draw.choices(string.ascii_uppercase + "_", k=8)): "1",
            "VLLM_PROMPT_BS_BUCKET_MAX": str(small(draw)),
            draw.choice(["VLLM_CONTIGUOUS_PA", "VLLM_EXPONENTIAL_BUCKETING"]): "true",
        }
        own = self.grid
        return draw.choice(
            [
                lambda: (AxisConfig, {"min": 1, "step": small(draw), "max": 50, "pad_percent": 25}),
                lambda: (BucketingConfig, {"strategy": "exp", "prompt_batch": axis_config(draw)}),
                lambda: (BucketingConfig.from_env, {"environ": environ}),
                lambda: (Bucket, {"axes": AXES, "shape": shape(draw)}),
                lambda: (
                    BucketGrid,
                    {"axes": {"a": [1, 4], "b": [2]}, "filters": (), "limits": None},
                ),
                lambda: (
                    BucketGrid,
                    {"axes": {"a": [1, 4]}, "reachable": lambda *_: True, "cost": max_of},
                ),
                lambda: (
                    BucketGrid.from_shapes,
                    {"axes": AXES, "shapes": [shape(draw), (1, 1, 1)]},
                ),
                lambda: (own.find, {"shape": shape(draw)}),
                lambda: (own.fallback, {"shape": shape(draw)}),
                lambda: (own.padding, {"shape": shape(draw)}),
                lambda: (own.coverage_gaps, {"limits": shape(draw)}),
                lambda: (own.values, {"axis": draw.choice(AXES)}),
                lambda: (own.buckets[0].__getitem__, {"axis": draw.choice(AXES)}),
                lambda: (api.linear_range, range_of),
                lambda: (api.exponential_range, {**range_of, "limit": small(draw)}),
                lambda: (
                    api.padding_aware_range,
                    {**range_of, "pad_max": small(draw), "pad_percent": 25},
                ),
                lambda: (
                    api.fitted_range,
                    {"lengths": shape(draw), "step": 2, "max": 99, "limit": 4, **fit},
                ),
                lambda: (
                    api.fitted_axes,
                    {"shapes": rows(draw), "steps": (1, 2), "maxima": (40, 40), "budget": 6, **fit},
                ),
                lambda: (
                    api.compare_strategies,
                    {"seen": rows(draw), "judged": rows(draw), "step": 4, "maxima": (40, 40)},
                ),
                lambda: (
                    api.prompt_grid,
                    {"config": config(draw), "max_num_batched_tokens": small(draw), **serving},
                ),
                lambda: (
                    api.decode_grid,
                    {"config": config(draw), "num_blocks": small(draw), **serving},
                ),
                lambda: (api.sequence_grid, {"phase": "decode", "config": config(draw), **serving}),
                lambda: (
                    api.prompt_grid,
                    {
                        "config": BucketingConfig(bucket_file=self.text_file(draw, ".txt")),
                        "max_num_batched_tokens": small(draw),
                        **serving,
                    },
                ),
                lambda: (api.read_bucket_file, {"path": self.text_file(draw, ".txt")}),
                lambda: (
                    api.write_bucket_file,
                    {"path": str(self.folder / "written"), "prompt": own, "comment": "x"},
                ),
                lambda: (api.read_trace, {"path": self.text_file(draw, ".csv"), "column": None}),
                lambda: (api.read_trace, {"path": self.text_file(draw, ".jsonl")}),
                lambda: (Trace, {"lengths": [1, 2], "arrivals": [0.0, 1.0], "outputs": None}),
                lambda: (self.trace.batches, {"window": 1.5, "max_num_seqs": small(draw)}),
                lambda: (TrafficRecorder, {"axes": AXES, "capacity": 64}),
                lambda: (TrafficRecorder.load, {"path": self.text_file(draw, ".json")}),
                lambda: (self.recorder.record, {"shape": shape(draw), "count": small(draw)}),
                lambda: (self.recorder.merge, {"other": self.recorder}),
                lambda: (self.recorder.save, {"path": str(self.folder / "saved")}),
            ]
        )()


def max_of(bucket: Bucket) -> float:
    return float(max(bucket.shape))


@contextmanager
def no_longer_than(seconds: int, what: str) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"{what} takes more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def play(folder: Path, seed: int, calls: int) -> int:
    """Make `calls` calls; the number of those that were rejected."""
    draw = random.Random(seed)
    world, refused = World(folder, draw), 0
    for number in range(calls):
        if number % 500 == 499:  # so that the counts of the recorder stay small
            world = World(folder, draw)
        function, arguments = world.call(draw)
        for name in draw.sample(sorted(arguments), min(draw.choice([0, 1, 1, 2]), len(arguments))):
            arguments[name] = wrong_value(draw)
        label = f"seed {seed}, call {number}: {function.__qualname__}({', '.join(arguments)})"
        before = world.state()
        try:
            with no_longer_than(LIMIT_S, label):
                function(**arguments)
        except BucketingError as error:
            assert str(error), label
            assert world.state() == before, f"{label} changed something, and was rejected: {error}"
            refused += 1
        except OSError as error:
            # Of the file system: a name that is not a file, or a folder.
            assert "path" in arguments, f"{label}: {error!r}"
            assert world.state() == before, label
        except Exception as error:
            raise AssertionError(f"{label} raises {error!r}") from error
        world.recorder.record((1, 2, 3))
        assert world.grid.find(world.grid.buckets[0].shape) is not None, label
    return refused


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some wrong values are names of files; they are made here."""
    (tmp_path / "names").mkdir()
    monkeypatch.chdir(tmp_path / "names")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "files").mkdir()
    return tmp_path / "files"


def test_wrong_calls_are_refused_with_the_packages_error_and_change_nothing(files: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    assert CALLS / 8 < play(files, seed, CALLS) < CALLS


@pytest.mark.soak
def test_a_hundred_thousand_wrong_calls(files: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    for part in range(10):
        folder = files / str(part)
        folder.mkdir()
        play(folder, seed + part, SOAK_CALLS // 10)
