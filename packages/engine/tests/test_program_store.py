"""Compiled programs on disk are whole or absent, whatever happened to the one who wrote them."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trencadis.engine.devices.program_store import ProgramStore


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
    later.fetch("key")
    assert (later.workplace / "ab" / "kernel.so").read_bytes() == b"machine code"


def test_another_key_finds_nothing(tmp_path: Path) -> None:
    stored(tmp_path)
    later = ProgramStore(tmp_path)
    later.fetch("another key")
    assert not later.present()


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


def test_what_a_killed_process_left_goes_after_a_day(tmp_path: Path) -> None:
    old, recent = tmp_path / "compiling-old", tmp_path / "compiling-recent"
    for path in (old, recent):
        path.mkdir()
    os.utime(old, (0, time.time() - 2 * 24 * 3600))
    ProgramStore(tmp_path)
    assert not old.exists()
    assert recent.exists()


def test_a_place_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = ProgramStore(tmp_path)
    missing = store.workplace / "no such file"
    store.keep("key", frozenset({missing}))
    assert "cannot be kept" in caplog.text
    assert not list(tmp_path.glob("*.zip"))
