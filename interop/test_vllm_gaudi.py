"""Our buckets and defragmentation in vLLM's plugin for Gaudi, beside the plugin's own.

``VLLM_GAUDI`` is a checkout of github.com/vllm-project/vllm-gaudi; ``nox -s interop`` makes one.
Intel's bridge is the engine's stand-in for it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CHECKOUT = os.environ.get("VLLM_GAUDI", "")
if not CHECKOUT:
    pytest.skip("VLLM_GAUDI names no checkout", allow_module_level=True)

PATHS = [
    CHECKOUT,
    str(ROOT / "interop"),
    str(ROOT / "packages/engine/tests/habana_standin"),
    str(ROOT / "packages/kvcache/tests"),
]
MOST_COPIES = 0.6
"""Of those of the plugin, for the same traffic."""


def run(*command: str, **environ: str) -> str:
    """What a process of its own prints, in which the plugin can be imported."""
    path = os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": path, **environ},
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize(("file", "passed"), [("bucketing", 40), ("decode_bucket_hybrid", 12)])
def test_the_plugin_s_own_tests_of_buckets_pass_on_ours(file: str, passed: int) -> None:
    options = ("-q", "-p", "no:cacheprovider", "-p", "vllm_gaudi_install")
    path = f"tests/unit_tests/test_{file}.py"
    printed = run("-m", "pytest", *options, path, TRENCADIS_VLLM_GAUDI="buckets")
    assert re.search(rf"^{passed} passed", printed, re.MULTILINE), printed[-3000:]


def test_ours_has_no_misses_and_as_many_buckets() -> None:
    printed = run(str(ROOT / "interop" / "vllm_gaudi_run.py"), "buckets")
    theirs, ours = (list(map(float, line.split())) for line in printed.splitlines()[-2:])
    print(f"\nbuckets, misses, padding: theirs {theirs}, ours {ours}")
    assert ours[0] <= theirs[0]
    assert ours[1] == 0 < theirs[1]
    assert ours[2] <= 1.02 * theirs[2]  # what misses add fits their shapes


@pytest.mark.parametrize("keeps", ["", "prefix-caching"])
def test_ours_copies_less_and_keeps_every_content(keeps: str) -> None:
    printed = run(str(ROOT / "interop" / "vllm_gaudi_run.py"), "defragmentation", keeps)
    theirs, ours = map(int, printed.splitlines()[-1].split())
    print(f"\nblocks copied: theirs {theirs}, ours {ours}")
    assert 0 < ours <= MOST_COPIES * theirs
