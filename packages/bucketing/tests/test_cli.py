"""The command: what it prints and writes, and its errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trencadis.bucketing import TrafficRecorder, read_bucket_file
from trencadis.bucketing.cli import main
from trencadis.bucketing.config import describe_axis_settings, describe_variables


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_BUCKETING_STRATEGY", "VLLM_BUCKETING_FROM_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    path = tmp_path / "trace.csv"
    rows = zip(np.sort(random.uniform(0, 60, 400)), random.integers(1, 2000, 400), strict=True)
    path.write_text("arrival,length\n" + "".join(f"{time},{length}\n" for time, length in rows))
    return path


def test_show_prints_the_log_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PROMPT_BS_BUCKET_MAX", "2")
    settings = ["--strategy", "lin", "--max-num-seqs", "4", "--max-model-len", "512"]
    assert main(["show", "--axes", "sequence", *settings]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "Prompt bucket config (min, step, max_warmup) bs:[1, 32, 2], seq:[128, 128, 512]"
    )
    assert lines[1].startswith("Generated 8 prompt buckets: [(1, 128), (1, 256)")
    assert lines[2].startswith("Decode bucket config (min, step, max_warmup) bs:[1, 128, 4]")
    assert main(["show", "--phase", "decode", *settings]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("bs:[1, 32, 4], blocks:[1, 128, 16]")
    assert main(["show", "--phase", "prompt", *settings, "--max-num-batched-tokens", "256"]) == 0
    assert "query:[128, 128, 256], blocks:[0, 1, 4]" in capsys.readouterr().out


def test_fit_prints_a_table_and_writes_a_bucket_file(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "buckets.txt"
    arguments = ["fit", str(trace), "--limit", "5", "--holdout", "0.5", "--output", str(output)]
    assert main([*arguments, "--context-blocks", "0", "8"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["strategy", "graphs", "padding", "worst", "case"]
    assert [line[:10].strip() for line in table[1:]] == [
        "lin",
        "exp",
        "pad",
        "fit as exp",
        "fit as pad",
        "fit to 5",
    ]
    shapes = read_bucket_file(output)
    assert len(shapes) == 10
    assert {shape[2] for shape in shapes} == {0, 8}
    assert shapes[-1] == (1, 2048, 8)


def test_fit_collects_batches_or_reads_recorded_ones(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", str(trace), "--window", "1", "--max-num-seqs", "4"]) == 0
    gathered = capsys.readouterr().out
    recorder = TrafficRecorder(("batch", "query", "context_blocks"))
    for shape in ((1, 100, 0), (1, 100, 4), (3, 500, 0)):
        recorder.record(shape, 7)
    saved = tmp_path / "traffic.json"
    recorder.save(saved)
    assert main(["fit", str(saved), "--max", "4096"]) == 0
    assert capsys.readouterr().out != gathered
    assert main(["fit", str(saved), "--holdout", "0.5"]) == 2
    assert "no end to hold out: omit --holdout" in capsys.readouterr().err


def test_plot_writes_a_picture(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for extra in ([], ["--window", "1"], ["--limit", "6"]):
        output = tmp_path / "picture.png"
        assert main(["plot", str(trace), *extra, "--output", str(output)]) == 0
        assert output.read_bytes().startswith(b"\x89PNG")
        output.unlink()


def test_help_lists_every_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["show", "--help"])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for name, meaning in {**describe_variables(), **describe_axis_settings()}.items():
        assert f"{name} {meaning}" in lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", "missing.csv"], "missing.csv"),
        (["show", "--strategy", "fit"], "set VLLM_PROMPT_BUCKETING_TRAFFIC"),
        (["show", "--block-size", "0"], "block_size 0 must be an integer"),
        (["fit", "{trace}", "--max", "100"], "raise the maxima"),
        (["fit", "{trace}", "--window", "-1"], "in windows of -1.0: raise them"),
    ],
)
def test_an_error_is_a_single_line(
    trace: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([argument.format(trace=trace) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("trencadis-buckets: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "value"),
    [("--step", "0"), ("--max", "-1"), ("--limit", "x"), ("--holdout", "1"), ("--holdout", "nan")],
)
def test_an_option_out_of_range_is_named(
    trace: Path, option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["fit", str(trace), f"{option}={value}"])
    assert stopped.value.code == 2
    assert f"argument {option}: {value!r} is not" in capsys.readouterr().err
