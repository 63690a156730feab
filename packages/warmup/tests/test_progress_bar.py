"""A progress bar on a terminal, with log lines above it; no output elsewhere."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from trencadis.warmup.progress_bar import track

pytest.importorskip("rich")


class Terminal(io.StringIO):
    """Standard error that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_without_a_terminal_there_is_no_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(track(range(3), 3, "Warm-up")) == [0, 1, 2]
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_a_bar_with_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    assert list(track(range(3), 3, "Warm-up")) == [0, 1, 2]
    assert "Warm-up" in terminal.getvalue()
    assert ":" in terminal.getvalue(), "the time left"
    erase_line = "\x1b[2K"
    assert terminal.getvalue().endswith(erase_line), "the bar goes when the work is done"


def test_log_lines_go_above_the_bar_and_handlers_are_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    handler, logger = logging.StreamHandler(terminal), logging.getLogger("trencadis")
    logger.addHandler(handler)
    try:
        for _ in track(range(2), 2, "Warm-up"):
            assert handler.stream is not terminal
            logger.warning("a line of the log")
        assert handler.stream is terminal
    finally:
        logger.removeHandler(handler)
    assert "a line of the log\n" in terminal.getvalue()


def test_closing_early_restores_handlers_and_ends_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    items = track(range(5), 5, "Warm-up")
    next(items)
    items.close()
    assert sys.stderr is terminal
