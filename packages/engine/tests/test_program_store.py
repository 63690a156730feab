"""Compiled programs on disk are whole and this user's own, or they are not loaded."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from trencadis.engine.devices import program_store
from trencadis.engine.devices.inductor import InductorPrograms, _settings
from trencadis.engine.devices.program_store import ProgramStore
from trencadis.engine.models.decoder_layers import depends_on_symbols

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")


def stored(directory: Path, key: str = "key", content: bytes = b"compiled" * 100) -> Path:
    """Keep one program; returns its archive."""
    store = ProgramStore(directory)
    known = store.present()
    (store.workplace / "ab").mkdir()
    (store.workplace / "ab" / "kernel.so").write_bytes(content)
    store.keep(key, store.present() - known)
    (archive,) = directory.glob("*.zip")
    return archive


def test_another_process_finds_what_was_kept(tmp_path: Path) -> None:
    stored(tmp_path, content=b"machine code")
    later = ProgramStore(tmp_path)
    assert later.has("key")
    assert later.fetch("key")
    assert (later.workplace / "ab" / "kernel.so").read_bytes() == b"machine code"


def test_another_key_finds_nothing(tmp_path: Path) -> None:
    stored(tmp_path)
    later = ProgramStore(tmp_path)
    assert not later.fetch("another key")
    assert not later.present()


def test_headers_are_no_part_of_a_program(tmp_path: Path) -> None:
    store = ProgramStore(tmp_path)
    (store.headers / "ab").mkdir(parents=True)
    (store.headers / "ab" / "prefix.h.gch").write_bytes(bytes(100))
    assert not store.present()


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_damaged_archive_is_never_taken_for_a_program(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("store")
    archive = stored(directory)
    content = bytearray(archive.read_bytes())
    if data.draw(st.booleans(), "cut"):
        content = content[: data.draw(st.integers(0, len(content) - 1), "length")]
    else:
        place = data.draw(st.integers(0, len(content) - 1), "place")
        content[place] ^= data.draw(st.integers(1, 255), "flip")
    archive.write_bytes(content)
    later = ProgramStore(directory)
    later.fetch("key")
    for path in later.present():
        assert path.read_bytes() == b"compiled" * 100


def test_many_damaged_archives_are_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = ProgramStore(tmp_path)
    for key in ("a", "b", "c"):
        store.keep(key, frozenset())
    for archive in tmp_path.glob("*.zip"):
        archive.write_bytes(b"of another program")
    with caplog.at_level(logging.WARNING):
        for key in ("a", "b", "c"):
            store.fetch(key)
    assert len(caplog.records) == 1
    assert "compiled anew" in caplog.text


def test_a_check_tells_why_an_archive_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It told that programs of buckets were missing, and their archives lay there."""
    archive = stored(tmp_path)
    archive.write_bytes(archive.read_bytes()[:-1])
    store = ProgramStore(tmp_path)
    for _ in range(2):
        assert not store.has("key")
    assert not store.has("another key"), "is not there, which is not a warning"
    (message,) = caplog.messages
    assert message == f"{archive} would not be loaded: it has changed since it was written, " + (
        "or is of another program"
    )


def test_what_a_killed_process_left_goes_at_the_next_start(tmp_path: Path) -> None:
    """150 MB of each start that is killed, as by an impatient supervisor."""
    left, begun = tmp_path / "compiling-left", tmp_path / "compiling-begun"
    for path in (left, begun):
        path.mkdir()
    os.utime(left, (0, time.time() - 120))
    ProgramStore(tmp_path)
    assert not left.exists()
    assert begun.exists(), "another process may be about to lock it"


def test_what_a_process_uses_stays_however_old_it_is(tmp_path: Path) -> None:
    used = ProgramStore(tmp_path)
    os.utime(used.workplace, (0, time.time() - 7 * 24 * 3600))
    ProgramStore(tmp_path)
    assert used.workplace.exists()


@pytest.mark.parametrize(("days", "stays"), [(0.9, True), (2, False)])
def test_without_locks_what_may_be_used_stays_for_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: float, stays: bool
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(program_store.fcntl, "flock", no_locks)
    place = tmp_path / "compiling-perhaps"
    place.mkdir()
    os.utime(place, (0, time.time() - days * 24 * 3600))
    ProgramStore(tmp_path)
    assert place.exists() == stays


def test_a_place_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = ProgramStore(tmp_path)
    missing = store.workplace / "no such file"
    store.keep("key", frozenset({missing}))
    assert "cannot be kept" in caplog.text
    assert not list(tmp_path.glob("*.zip"))


def test_a_full_disk_is_one_warning_that_says_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ProgramStore(tmp_path)
    write = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        write(path, content[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    for key in ("a", "b"):
        store.keep(key, frozenset())
    assert not list(tmp_path.glob("*.zip"))
    assert not store.present(), "what was written of an archive is removed"
    (record,) = caplog.records
    text = record.getMessage()
    assert "No space left on device" in text
    assert str(tmp_path) in text
    assert "name another directory with --compile-cache" in text


def test_a_program_that_does_not_fit_where_it_is_unpacked_is_not_half_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(tmp_path)
    later = ProgramStore(tmp_path)
    write = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        write(path, content[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    later.fetch("key")
    assert not later.present()
    assert "compiled anew: [Errno 28] No space left on device" in caplog.text


def test_an_archive_under_the_name_of_another_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    archive = stored(tmp_path)
    other = stored(tmp_path / "other", key="another key")
    other.replace(archive)
    later = ProgramStore(tmp_path)
    later.fetch("key")
    assert not later.present()
    assert not later.has("key")
    assert "or is of another program" in caplog.text


def test_archives_of_an_older_release_are_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    archive = stored(tmp_path)
    archive.write_bytes(archive.read_bytes()[150:])
    later = ProgramStore(tmp_path)
    later.fetch("key")
    assert "or of another release" in caplog.text
    later.keep("key", later.present())
    assert later.has("key")


@as_root
def test_an_archive_of_another_user_is_not_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    archive = stored(tmp_path)
    os.chown(archive, NOBODY, NOBODY)
    later = ProgramStore(tmp_path)
    later.fetch("key")
    assert not later.present()
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith(f"{archive} is not loaded, and its program is compiled anew: it belongs")
    assert "chown it, or pass --trust-compile-cache" in text
    assert not later.has("key")
    trusting = ProgramStore(tmp_path, trusted=True)
    trusting.fetch("key")
    assert trusting.present()


def test_an_archive_that_others_can_write_is_not_loaded(tmp_path: Path) -> None:
    stored(tmp_path).chmod(0o666)
    assert not ProgramStore(tmp_path).has("key")


def test_a_pipe_in_the_place_of_an_archive_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    archive = stored(tmp_path)
    archive.unlink()
    os.mkfifo(archive)
    assert not ProgramStore(tmp_path).has("key")


@as_root
def test_a_directory_of_another_user_is_neither_read_nor_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "theirs"
    archive = stored(directory)
    os.chown(directory, NOBODY, NOBODY)
    before = sorted(directory.iterdir())
    later = ProgramStore(directory)
    later.fetch("key")
    assert not later.present()
    later.keep("key 2", frozenset())
    assert sorted(directory.iterdir()) == before == [archive]
    (record,) = caplog.records
    text = record.getMessage()
    assert f"{directory} belongs to " in text
    assert "chmod go-w" in text
    assert "--trust-compile-cache" in text


@pytest.mark.parametrize(("mode", "loaded"), [(0o777, False), (0o1777, True), (0o755, True)])
def test_a_directory_above_that_others_can_write_is_not_trusted(
    tmp_path: Path, mode: int, loaded: bool
) -> None:
    """Who can write there can replace what is below it, except where the sticky bit is set."""
    above = tmp_path / "above"
    stored(above / "cache")
    above.chmod(mode)
    assert ProgramStore(above / "cache").has("key") == loaded
    (above / "cache").chmod(0o1777)  # not above: others can write to the cache itself
    assert not ProgramStore(above / "cache").has("key")
    (above / "cache").chmod(0o700)
    assert ProgramStore(above / "cache", trusted=True).has("key")


@pytest.fixture
def readable() -> Iterator[Path]:
    """A directory that every user can reach, which the one of pytest is not."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o755)
    yield directory
    directory.chmod(0o755)
    shutil.rmtree(directory)


def as_one_who_cannot_write(directory: Path, work: Callable[[], None]) -> None:
    """Call ``work`` in a process for which ``directory`` is read-only. It must not fail."""
    for path in (directory, *directory.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o222)
    child = os.fork()
    if not child:
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_programs_are_read_from_a_directory_that_cannot_be_written(
    readable: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored(readable)

    def serve() -> None:
        store = ProgramStore(readable)
        store.fetch("key")
        assert (store.workplace / "ab" / "kernel.so").read_bytes() == b"compiled" * 100
        assert not caplog.records
        for key in ("lacking", "lacking, too"):
            store.fetch(key)
            store.keep(key, store.present())
        (record,) = caplog.records
        assert f"cannot be kept in {readable} (Permission denied)" in record.getMessage()

    as_one_who_cannot_write(readable, serve)


def test_two_servers_on_one_directory_do_not_meet(tmp_path: Path) -> None:
    stores = [ProgramStore(tmp_path) for _ in range(2)]
    for number, store in enumerate(stores):
        store.fetch("key")
        (store.workplace / "kernel.so").write_bytes(b"by %d" % number)
        store.keep("key", store.present())
    stores[0].fetch("key")
    assert (stores[0].workplace / "kernel.so").read_bytes() == b"by 0", "it may be loaded"
    later = ProgramStore(tmp_path)
    later.fetch("key")
    assert (later.workplace / "kernel.so").read_bytes() == b"by 1"


def test_what_another_server_removes_at_the_same_time_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "compiling-gone").symlink_to(tmp_path / "no such directory")
    ProgramStore(tmp_path)


@pytest.mark.slow
def test_a_program_of_which_the_compiler_takes_a_size_for_granted_is_told_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor guards on a size; a program that comes from a cache would not say so."""
    from torch._inductor.graph import GraphLowering

    lower = GraphLowering.run

    def guarding(graph: GraphLowering, *args: object) -> object:
        lowered = lower(graph, *args)
        sizes = [size for each in graph.graph_inputs.values() for size in each.get_size()]
        (tokens,) = {size for size in sizes if not size.is_number}
        assert graph.sizevars.guard_or_false(sympy.Lt(tokens, 100))
        return lowered

    monkeypatch.setattr(GraphLowering, "run", guarding)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # as it was, after `keep` has set it
    programs = InductorPrograms()
    programs.keep(tmp_path / "cache", trusted=False)
    fake = FakeTensorMode(shape_env=ShapeEnv())
    symbol = StatelessSymbolicContext(
        dynamic_sizes=[DimDynamic.STATIC, DimDynamic.DUCK, DimDynamic.STATIC]
    )
    with torch.no_grad():
        tokens = fake.from_tensor(
            torch.randn(1, 7, 8), symbolic_context=symbol, source=ConstantSource("tokens")
        )
        weight = fake.from_tensor(torch.randn(8, 8), static_shapes=True)
        with fake, enable_python_dispatcher():
            module = make_fx(lambda x, w: (x.view(-1, 8) @ w).view(1, -1, 8))(tokens, weight)
        assert not depends_on_symbols([tokens, weight])
        programs.compile(module, [tokens, weight])
    assert depends_on_symbols([tokens, weight])
    assert programs.compiled == 1
    assert not programs.is_kept(module, [tokens, weight])


def normed(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "starts_threads"), [(1, False), (29, True)])
def test_the_numbers_of_one_token_start_no_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int, starts_threads: bool
) -> None:
    """To start them takes longer: a tenth of a decode step of a small model."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # as it was, after `keep` has set it
    programs = InductorPrograms()
    programs.keep(tmp_path, trusted=False)
    inputs = [torch.randn(1, tokens, 576), torch.randn(576)]
    program = programs.compile(make_fx(normed, tracing_mode="fake")(*inputs), inputs)
    torch.testing.assert_close(program(*inputs), normed(*inputs))
    code = [path.read_text() for path in tmp_path.rglob("*.main.cpp")]
    assert any("omp parallel" in each for each in code) is starts_threads
    assert code


def test_threads_are_started_where_a_tensor_is_large_or_its_size_is_not_known() -> None:
    few, many = torch.zeros(2, 8192), torch.zeros(2, 8193)
    for number, (tensor, is_alone) in enumerate(((few, True), (many, False))):
        module = make_fx(lambda x: (x + 1).sum(), tracing_mode="fake")(tensor)
        assert (_settings(module).get("cpp.threads") == 1) is is_alone, number
    module = make_fx(lambda x: x + 1, tracing_mode="fake")(few)
    for node in module.graph.nodes:
        node.meta.clear()
    assert "cpp.threads" not in _settings(module)
    module = make_fx(lambda x: x + 1, tracing_mode="symbolic")(few)
    assert "cpp.threads" not in _settings(module)


def test_precompiled_headers_are_there_while_they_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """150 MB: those of g++ and of clang++, and those of a program that live traffic compiles."""
    programs = InductorPrograms()
    programs.keep(tmp_path, trusted=False)

    def compile_with_headers(module: object, inputs: object, headers: Path) -> Callable[..., None]:
        headers.mkdir(exist_ok=True)
        (headers / "prefix.h").touch()
        (headers / "prefix.h.gch").write_bytes(bytes(100))
        (headers / "prefix.h.pch").write_bytes(bytes(100))
        return lambda *_: None

    def present() -> set[str]:
        return {path.suffix for path in tmp_path.rglob("prefix.*")}

    monkeypatch.setattr(programs, "_compile", compile_with_headers)
    module = fx.symbolic_trace(nn.Identity())
    programs.compile(module, [torch.zeros(2)])
    assert present() == {".h", ".gch", ".pch"}, "for the next program"
    programs.drop_headers()
    assert present() == {".h"}
    programs.compile(module, [torch.zeros(3)])
    assert present() == {".h"}
