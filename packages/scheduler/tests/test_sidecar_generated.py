"""The generated code is what protoc writes for ``temperature.proto``."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("grpc_tools")

from trencadis.scheduler.telemetry import regenerate


def test_the_stored_code_is_what_protoc_writes() -> None:
    assert regenerate.main(["--check"]) == 0


def test_a_difference_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(regenerate, "GENERATED", tmp_path)
    assert regenerate.main(["--check"]) == 1
    assert regenerate.main([]) == 0
    assert regenerate.main(["--check"]) == 0
    stale = tmp_path / "temperature_pb2.py"
    stale.write_text(stale.read_text(encoding="utf-8") + "# edited\n", encoding="utf-8")
    capsys.readouterr()
    assert regenerate.main(["--check"]) == 1
    assert "temperature_pb2.py differs from protoc's output" in capsys.readouterr().err
