"""The decode kernel of the CPU is compiled once, and a machine that cannot have it serves on."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from trencadis.engine import LLM, SamplingParams
from trencadis.engine.devices.cpu import attention, native_kernel
from trencadis.engine.devices.cpu.attention import attention_kernel
from trencadis.engine.devices.cpu.native_kernel import NoKernel, load_kernel

SOURCE = 'extern "C" int answer() { return ANSWER; }\n'
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [list(range(1, 40)), [7], list(range(100, 117))]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.cpp"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of the compiler."""
    commands: list[list[str]] = []
    run = subprocess.run

    def counted(command: list[str], **options: object) -> object:
        commands.append(command)
        return run(command, **options)

    monkeypatch.setattr(native_kernel.subprocess, "run", counted)
    return commands


def test_a_kernel_is_compiled_once(
    source: Path, tmp_path: Path, compilations: list[list[str]]
) -> None:
    directory = tmp_path / "kernels"
    assert load_kernel(source, ["ANSWER=42"], directory).answer() == 42
    assert load_kernel(source, ["ANSWER=42"], directory).answer() == 42
    assert len(compilations) == 1
    assert load_kernel(source, ["ANSWER=43"], directory).answer() == 43
    source.write_text(SOURCE.replace("ANSWER;", "ANSWER + 1;"))
    assert load_kernel(source, ["ANSWER=42"], directory).answer() == 43
    assert len(compilations) == 3
    assert directory.stat().st_mode & 0o077 == 0
    assert len(list(directory.glob("*"))) == 2 * 3, "libraries and their checksums are left"


def test_a_kernel_is_compiled_again_where_a_header_of_it_has_changed(
    source: Path, tmp_path: Path
) -> None:
    directory, header = tmp_path / "kernels", source.with_name("more.h")
    source.write_text(f'#include "more.h"\n{SOURCE.replace("ANSWER;", "ANSWER + MORE;")}')
    for more in (1, 2):
        header.write_text(f"#define MORE {more}\n")
        assert load_kernel(source, ["ANSWER=42"], directory).answer() == 42 + more
    header.unlink()
    with pytest.raises(NoKernel, match=r"more\.h"):
        load_kernel(source, ["ANSWER=42"], directory)


@pytest.mark.parametrize("length", [0, 8_000])
def test_a_truncated_kernel_is_compiled_again(source: Path, tmp_path: Path, length: int) -> None:
    directory = tmp_path / "kernels"
    load_kernel(source, ["ANSWER=42"], directory)
    (library,) = directory.glob("*.so")
    whole = library.read_bytes()
    library.unlink()  # this process has loaded it
    library.write_bytes(whole[:length])
    assert load_kernel(source, ["ANSWER=42"], directory).answer() == 42
    assert library.read_bytes() != whole[:length]


@pytest.mark.parametrize("place", ["kernels", "."])
def test_a_directory_that_others_can_write_is_not_used(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    place: str,
) -> None:
    """Nor one below it: who can write there can replace it."""
    home = tmp_path / "home"
    monkeypatch.setattr(native_kernel.platformdirs, "user_cache_dir", lambda _: str(home))
    directory = tmp_path / "shared" / "kernels"
    load_kernel(source, ["ANSWER=42"], directory)
    for library in directory.glob("*.so"):
        library.unlink()  # this process has loaded it
        library.write_bytes(b"not to be loaded")
    (directory.parent / place).chmod(0o777)
    assert load_kernel(source, ["ANSWER=42"], directory).answer() == 42
    assert len(list(home.glob("kernels/*.so"))) == 1
    assert "another user may have made what is in" in caplog.text
    assert "can be written by everyone" in caplog.text


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")
def test_a_library_of_another_user_is_compiled_again(
    source: Path, tmp_path: Path, compilations: list[list[str]]
) -> None:
    load_kernel(source, ["ANSWER=42"], tmp_path)
    (library,) = tmp_path.glob("answer-*.so")
    shutil.copy(library, tmp_path / "copy")
    (tmp_path / "copy").replace(library)  # this process has loaded the other
    os.chown(library, 65534, 65534)
    assert load_kernel(source, ["ANSWER=42"], tmp_path, trusted=True).answer() == 42
    assert len(compilations) == 1
    load_kernel(source, ["ANSWER=42"], tmp_path)
    assert len(compilations) == 2
    assert library.stat().st_uid == 0


def test_without_room_or_right_to_write_the_users_own_cache_serves(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.setattr(native_kernel.platformdirs, "user_cache_dir", lambda _: str(home))
    (tmp_path / "file").touch()
    assert load_kernel(source, ["ANSWER=42"], tmp_path / "file" / "below").answer() == 42
    assert len(list(home.glob("kernels/*.so"))) == 1


def test_a_directory_takes_what_the_users_own_cache_has(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compilations: list[list[str]],
) -> None:
    """If it is whole, and nobody else can have written it."""
    home = tmp_path / "home"
    monkeypatch.setattr(native_kernel.platformdirs, "user_cache_dir", lambda _: str(home))
    load_kernel(source, ["ANSWER=42"])
    (made,) = home.glob("kernels/*.so")
    assert load_kernel(source, ["ANSWER=42"], tmp_path / "copies").answer() == 42
    assert len(compilations) == 1
    copies = {path.name: path.read_bytes() for path in (tmp_path / "copies").iterdir()}
    assert copies == {path.name: path.read_bytes() for path in made.parent.iterdir()}
    made.parent.chmod(0o777)
    assert load_kernel(source, ["ANSWER=42"], tmp_path / "other").answer() == 42
    assert len(compilations) == 2
    made.parent.chmod(0o700)
    made.unlink()  # this process has loaded it
    made.write_bytes(b"not to be loaded")
    assert load_kernel(source, ["ANSWER=42"], tmp_path / "third").answer() == 42
    assert len(compilations) == 3


@pytest.mark.parametrize(
    ("text", "compiler", "reason"),
    [
        ("no C++", None, "failed"),
        (SOURCE, "no-such-compiler", "there is no C\\+\\+ compiler 'no-such-compiler'"),
        (SOURCE, "false", "false failed: exit status 1"),
    ],
)
def test_what_cannot_be_compiled_is_told_and_leaves_nothing(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    compiler: str | None,
    reason: str,
) -> None:
    source.write_text(text)
    if compiler:
        monkeypatch.setenv("CXX", compiler)
    with pytest.raises(NoKernel, match=reason):
        load_kernel(source, ["ANSWER=42"], tmp_path / "kernels")
    assert list(tmp_path.glob("kernels/*")) == []


def test_a_compiler_that_hangs_is_stopped(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "slow"
    compiler.write_text("#!/bin/sh\nexec sleep 600\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(native_kernel, "_LIMIT_SECONDS", 0.2)
    with pytest.raises(NoKernel, match="took more than"):
        load_kernel(source, ["ANSWER=42"], tmp_path / "kernels")


@pytest.mark.parametrize(
    ("head_dim", "dtype", "reason"),
    [(40, torch.float32, "not a multiple of 16"), (64, torch.float16, "not in torch.float16")],
)
def test_a_model_without_a_kernel_is_refused(
    head_dim: int, dtype: torch.dtype, reason: str
) -> None:
    with pytest.raises(NoKernel, match=reason):
        attention_kernel(4, 2, head_dim, dtype)


def tokens(model: Path) -> list[tuple[int, ...]]:
    llm = LLM(str(model), device="cpu", dtype="float32", max_model_len=64)
    return [result.completions[0].token_ids for result in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("fault", ["no compiler", "wrong results"])
def test_without_a_right_kernel_the_tokens_are_the_same(
    tiny_model: Path,
    make_tiny_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    caplog.set_level(logging.INFO)
    expected = tokens(tiny_model)
    assert "has no kernel" not in caplog.text
    if fault == "no compiler":
        monkeypatch.setenv("CXX", "no-such-compiler")
    else:
        right = attention.attention_kernel

        def wrong(*model: object, **where: object) -> object:
            kernel = right(*model, **where)

            def decode(*given: Any) -> int:
                *others, scale_bits, num_threads = given
                twice = scale_bits + (1 << 23)  # by the exponent
                return kernel.decode(*others, twice, num_threads)

            return attrs.evolve(kernel, decode=decode)

        monkeypatch.setattr(attention, "attention_kernel", wrong)
    assert tokens(tiny_model) == expected
    assert "Attention has no kernel of its own and is slower: " in caplog.text
    assert ("off by" in caplog.text) == (fault == "wrong results")


@pytest.mark.parametrize("order", [("fast", "slow"), ("slow", "fast")])
def test_one_late_trial_does_not_decide_which_way_is_fastest(order: tuple[str, str]) -> None:
    threads, late = torch.get_num_threads(), [0.02]
    torch.set_num_threads(2)

    def compute(way: str) -> None:
        assert torch.get_num_threads() == 1
        time.sleep(0.002 if way == "slow" else late.pop() if late else 0.0)

    try:
        assert native_kernel.fastest("A test", {name: name for name in order}, compute) == "fast"
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
