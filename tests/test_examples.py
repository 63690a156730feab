"""The programs in ``examples/``: short, each with its library alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from house import ALLOWED

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MOST_LINES = 60

PRINTED = {
    "bucketing_fallback": "(3, 1500) runs as (4, 1536)\n(4, 1400) runs as (4, 1536)\n",
    "kvcache_own_allocator": "decode reads 48 blocks, then 12\nr9 has {9.0}\nr10 has {10.0}\n",
    "scheduler_under_heat": "hot: 8 of 8 run\nordered: 5 of 5 run\npreempted: r15 r14 r13\n",
    "warmup_behind_traffic": "serves after 4 s\n9 of 9 buckets are ready after 18 s\n",
    # 12 prompt tokens from n on add up to 12 n + 66; each output token doubles the sum, modulo 50.
    "joined_toy_engine": "",
    "engine_batch": "The capital of France is Paris.",
}


RUN = """
import runpy, sys
runpy.run_path(sys.argv[1], run_name="__main__")
names = (name.split(".") for name in sys.modules if name.startswith("trencadis."))
print(*{name[1] for name in names}, file=sys.stderr)
"""


def output_of(example: Path) -> str:
    """What a program prints. It imports the package in its name and those below that alone."""
    command = [sys.executable, "-c", RUN, str(example)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    package = example.stem.split("_")[0]
    found = set(ALLOWED) if package == "joined" else {package, *ALLOWED[package]}
    assert set(done.stderr.splitlines()[-1].split()) <= found
    return done.stdout


def test_there_is_one_for_each_library_and_one_that_joins_them() -> None:
    assert [example.stem for example in EXAMPLES] == sorted(PRINTED)
    for example in EXAMPLES:
        assert len(example.read_text(encoding="utf-8").splitlines()) <= MOST_LINES, example.name


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(path, marks=[pytest.mark.slow] if path.stem == "engine_batch" else [])
        for path in EXAMPLES
    ],
    ids=lambda path: path.stem,
)
def test_an_example_prints_what_it_should(example: Path) -> None:
    printed = output_of(example)
    assert PRINTED[example.stem] in printed
    if example.stem == "joined_toy_engine":
        assert printed.splitlines() == [*map(toy_answer, range(8)), "4 preemptions"]


def toy_answer(number: int) -> str:
    """The last of 20 tokens, computed without a cache."""
    tokens = list(range(number, number + 12))
    for _ in range(20):
        tokens.append(sum(tokens) % 50)
    return f"r{number} ends with {tokens[-1]}"
