"""Traffic is recorded while it is served, and the next start fits its buckets to it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import platformdirs
import pytest

from trencadis.bucketing import TrafficRecorder
from trencadis.bucketing.cli import main
from trencadis.engine import ConfigError, EngineConfig, EngineCore, SamplingParams
from trencadis.engine.runner import recorded_traffic
from trencadis.engine.runner.recorded_traffic import TrafficLog
from trencadis.warmup import Phase

SMALL = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "block_size": 8,
    "num_blocks": 60,
    "warmup": "none",
    "use_buckets": True,
}
AXES = {Phase.PROMPT: ("batch", "query", "context_blocks"), Phase.DECODE: ("batch", "blocks")}


def started(model: Path, environ: dict[str, str] | None = None, **changes: object) -> EngineCore:
    settings = {"model": str(model), **SMALL, **changes}
    core = EngineCore(EngineConfig.from_env(environ or {}, **settings))
    core.warm_up()
    return core


def serve(core: EngineCore, lengths: list[int], max_tokens: int = 3) -> None:
    """Serve prompts of these lengths one after the other."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    for i, length in enumerate(lengths):
        core.add(str(i), tuple((7 * i + k) % 256 for k in range(length)), params)
        while core.has_work:
            core.step()


def test_sizes_are_recorded_and_the_fit_command_reads_them(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "traffic.json"
    core = started(tiny_model, record_traffic=str(file))
    serve(core, [21, 21, 50])
    core.close()
    prompts = TrafficRecorder.load(file)
    assert prompts.axes == AXES[Phase.PROMPT]
    shapes, counts = prompts.shapes()
    assert [
        (*shape, count) for shape, count in zip(shapes.tolist(), counts.tolist(), strict=True)
    ] == [
        (1, 21, 0, 2),
        (1, 50, 0, 1),
    ]
    decodes = TrafficRecorder.load(tmp_path / "traffic.decode.json")
    assert (decodes.axes, decodes.total) == (AXES[Phase.DECODE], 6)
    assert set(json.loads(file.read_text())) == {"axes", "capacity", "resolution", "counts"}
    assert main(["fit", str(file), "--step", "8"]) == 0
    assert "fit" in capsys.readouterr().out


def test_a_server_adds_to_what_an_earlier_one_recorded(tiny_model: Path, tmp_path: Path) -> None:
    for _ in range(2):
        core = started(tiny_model, record_traffic=tmp_path / "t.json")
        serve(core, [21])
        core.close()
    assert TrafficRecorder.load(tmp_path / "t.json").total == 2


@pytest.mark.parametrize("changes", [{"use_buckets": False}, {"bucket_grid": "seq"}])
def test_every_kind_of_batch_is_recorded(
    tiny_model: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    core = started(tiny_model, record_traffic=tmp_path / "t.json", **changes)
    serve(core, [21])
    core.close()
    assert TrafficRecorder.load(tmp_path / "t.json").total == 1
    assert TrafficRecorder.load(tmp_path / "t.decode.json").total == 2


def test_a_file_of_something_else_is_not_overwritten(tiny_model: Path, tmp_path: Path) -> None:
    letter = tmp_path / "letter.json"
    letter.write_text("Dear all")
    with pytest.raises(ConfigError, match=r"letter.json is not recorded traffic"):
        started(tiny_model, record_traffic=letter)
    assert letter.read_text() == "Dear all"
    other = tmp_path / "other.json"
    TrafficRecorder(("batch", "seq")).save(other)
    with pytest.raises(ConfigError, match=r"other.json has traffic of batch, seq, and this server"):
        started(tiny_model, record_traffic=other)
    with pytest.raises(ConfigError, match=r"record_traffic .* cannot be written"):
        started(tiny_model, record_traffic=tmp_path / "none" / "t.json")


def test_the_log_is_bounded_and_written_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    file = tmp_path / "t.json"
    log = TrafficLog(file, AXES, clock=lambda: now[0])
    for length in range(10_000):
        log.record(Phase.PROMPT, (1, length, 0))
    assert TrafficRecorder.load(file).total == 0
    now[0] = recorded_traffic.SAVE_SECONDS + 1
    log.record(Phase.DECODE, (1, 2))
    recorded = TrafficRecorder.load(file)
    assert recorded.total == 10_000
    assert len(recorded.shapes()[0]) <= recorded_traffic.CAPACITY
    assert file.stat().st_size < 100_000
    monkeypatch.setattr(
        TrafficRecorder, "save", lambda *_: (_ for _ in ()).throw(OSError(28, "full"))
    )
    for _ in range(3):
        log.save()
    assert caplog.text.count("Traffic cannot be written") == 1
    monkeypatch.undo()
    log.save()
    assert TrafficRecorder.load(tmp_path / "t.decode.json").total == 1


def test_buckets_are_fitted_to_recorded_traffic(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    core = started(tiny_model, record_traffic=file)
    serve(core, [21, 22, 24, 40] * 5)
    core.close()
    fitted = started(tiny_model, bucket_grid=f"fitted:{file}")
    assert {24, 40} <= set(fitted.worker.grids.prompt.values("query"))
    serve(fitted, [21, 40, 100])
    assert fitted.stats.num_bucket_misses == 0
    assert main(["fit", str(file), "--step", "8", "--output", str(tmp_path / "b.txt")]) == 0
    listed = started(tiny_model, bucket_grid=f"fitted:{tmp_path / 'b.txt'}")
    assert {24, 40} & set(listed.worker.grids.prompt.values("query"))
    with pytest.raises(ConfigError, match=r"none.json"):
        started(tiny_model, bucket_grid=f"fitted:{tmp_path / 'none.json'}")


def test_a_restart_learns_from_what_was_served_and_tells_what_it_saves(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda name: str(tmp_path / name))
    with caplog.at_level(logging.INFO):
        first = started(tiny_model, bucket_grid="learn")
        assert "Nothing learned yet: 0 prompt and 0 decode batches are recorded" in caplog.text
        serve(first, [17, 33] * 51, max_tokens=2)
        first.close()
        padded = first.stats.num_padded_tokens
        assert padded > 0
        second = started(tiny_model, bucket_grid="learn")
    (said,) = [message for message in caplog.messages if message.startswith("Buckets are learned")]
    assert said.startswith("Buckets are learned from 102 prompt and 102 decode batches: ")
    assert "in place of" in said
    serve(second, [17, 33] * 51, max_tokens=2)
    assert second.stats.num_padded_tokens < padded
    assert second.stats.num_bucket_misses == 0
    serve(second, [1, 90, 128 - 3], max_tokens=3)
    assert second.stats.num_bucket_misses == 0, "what was never served has buckets, too"
    second.close()
    files = (tmp_path / "trencadis" / "traffic").iterdir()
    (file,) = (file for file in files if ".decode." not in file.name)
    assert TrafficRecorder.load(file).total >= 204, "a server that has learned goes on recording"


def test_graphs_are_captured_in_the_order_of_what_was_served(
    lazy_gaudi: object, tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = {"max_model_len": 48, "max_num_seqs": 2, "max_num_batched_tokens": 16, "num_blocks": 13}
    small |= {"device": "hpu", "record_traffic": tmp_path / "t.json"}
    strategy = {"VLLM_GRAPH_DECODE_STRATEGY": "traffic"}
    first = started(tiny_model, strategy, **{**small, "warmup": "full"})
    assert "VLLM_GRAPH_DECODE_STRATEGY=traffic has no recorded traffic" in caplog.text
    serve(first, [40], max_tokens=8)
    first.close()
    caplog.clear()
    with caplog.at_level(logging.INFO):
        started(tiny_model, strategy, **{**small, "warmup": "full"})
    assert "has no recorded traffic" not in caplog.text
    (captured,) = [m for m in caplog.messages if m.startswith("[Warmup][Graph/Decode][1/")]
    assert " batch_size:1 num_blocks:13 " in captured, "the bucket that was used, not the smallest"
