"""Traffic is recorded while it is served, and the next start fits its buckets to it."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
from pathlib import Path

import platformdirs
import pytest
from torch import nn

from trencadis.bucketing import TrafficRecorder
from trencadis.bucketing.cli import main
from trencadis.engine import ConfigError, EngineConfig, EngineCore, GenerateRequest, SamplingParams
from trencadis.engine.devices import CPUDevice, Device
from trencadis.engine.models.block_attention import BlockAttention
from trencadis.engine.runner import recorded_traffic
from trencadis.engine.runner.in_process import InProcessExecutor
from trencadis.engine.runner.learned_grids import LEARN_FROM, served_traffic
from trencadis.engine.runner.recorded_traffic import TrafficLog, decode_file
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


def started(
    model: Path, environ: dict[str, str] | None = None, on: Device | None = None, **changes: object
) -> EngineCore:
    settings = {"model": str(model), **SMALL, **changes}
    if on is not None:
        settings["device"] = on
    core = EngineCore(EngineConfig.from_env(environ or {}, **settings))
    core.warm_up()
    return core


def serve(core: EngineCore, lengths: list[int], max_tokens: int = 3) -> None:
    """Serve prompts of these lengths one after the other."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    for i, length in enumerate(lengths):
        core.add(str(i), GenerateRequest(tuple((7 * i + k) % 256 for k in range(length)), params))
        while core.has_work:
            core.step()


def serve_at_once(core: EngineCore, lengths: list[int]) -> None:
    """Serve prompts of these lengths together."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    for i, length in enumerate(lengths):
        core.add(str(i), GenerateRequest(tuple((7 * i + k) % 256 for k in range(length)), params))
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
    log.record(Phase.DECODE, (1, 2))
    for _ in range(3):
        log.save()
    assert caplog.text.count("Traffic cannot be written") == 1
    monkeypatch.undo()
    log.save()
    assert TrafficRecorder.load(tmp_path / "t.decode.json").total == 2


def test_two_servers_add_to_one_file(tmp_path: Path) -> None:
    """The one that wrote last had the file to itself, and the counts of the other were lost."""
    file = tmp_path / "t.json"
    logs = [TrafficLog(file, AXES) for _ in range(2)]
    for number, log in enumerate([*logs, *logs, logs[0]]):
        log.record(Phase.PROMPT, (1, number, 0))
        log.record(Phase.DECODE, (1, 7))
        log.save()
    assert TrafficRecorder.load(file).shapes()[1].tolist() == [1] * 5
    assert TrafficRecorder.load(decode_file(file)).total == 5
    logs[1].save()
    assert TrafficRecorder.load(file).total == 5, "what was written is not added again"
    assert {path.name for path in tmp_path.iterdir()} == {
        "t.json",
        "t.decode.json",
        "t.json.lock",
    }


def test_counts_are_kept_while_another_process_holds_the_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "t.json"
    log = TrafficLog(file, AXES)
    for said in (1, 2):
        with (tmp_path / "t.json.lock").open() as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            log.record(Phase.PROMPT, (1, 21, 0))
            log.save()
        assert caplog.text.count("another process holds its lock") == said, "told each time anew"
        log.save()
        assert TrafficRecorder.load(file).total == said


def test_a_server_starts_while_another_holds_the_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (tmp_path / "t.json.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        log = TrafficLog(tmp_path / "t.json", AXES)
        assert "another process holds its lock" in caplog.text
    log.record(Phase.PROMPT, (1, 21, 0))
    log.save()
    assert TrafficRecorder.load(tmp_path / "t.json").total == 1


def test_a_file_that_is_replaced_by_other_traffic_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "t.json"
    log = TrafficLog(file, AXES)
    for text in ("Dear all", '{"axes": ["n"], "capacity": 9, "resolution": [1], "counts": []}'):
        file.write_text(text)
        log.record(Phase.PROMPT, (1, 21, 0))
        log.save()
        assert file.read_text() == text
    assert caplog.text.count("Traffic cannot be written") == 1
    file.unlink()
    log.save()
    assert TrafficRecorder.load(file).total == 2


def test_a_pipe_as_traffic_file_is_an_error(tiny_model: Path, tmp_path: Path) -> None:
    """The server waited for a writer."""
    os.mkfifo(tmp_path / "pipe.json")
    for settings in (
        ("record_traffic", str(tmp_path / "pipe.json")),
        (
            "bucket_grid",
            f"fitted:{tmp_path / 'pipe.json'}",
        ),
    ):
        with pytest.raises(ConfigError, match=r"pipe\.json is not a (regular )?file"):
            started(tiny_model, **dict([settings]))


def test_a_warm_up_without_serving_leaves_the_traffic_file_as_it_is(
    tiny_model: Path, tmp_path: Path
) -> None:
    settings = {"model": str(tiny_model), **SMALL, "record_traffic": tmp_path / "t.json"}
    config = EngineConfig.from_env({}, **settings)
    core = EngineCore(config, InProcessExecutor(config, records=False))
    core.warm_up()
    core.close()
    assert list(tmp_path.iterdir()) == []


def test_buckets_are_fitted_to_recorded_traffic(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    core = started(tiny_model, record_traffic=file)
    serve(core, [21, 22, 24, 40] * 5)
    core.close()
    fitted = started(tiny_model, bucket_grid=f"fitted:{file}")
    assert {24, 40} <= set(fitted.executor.worker.grids.prompt.values("query"))
    serve(fitted, [21, 40, 100])
    assert fitted.stats.num_bucket_misses == 0
    assert main(["fit", str(file), "--step", "8", "--output", str(tmp_path / "b.txt")]) == 0
    listed = started(tiny_model, bucket_grid=f"fitted:{tmp_path / 'b.txt'}")
    assert {24, 40} & set(listed.executor.worker.grids.prompt.values("query"))
    with pytest.raises(ConfigError, match=r"none.json"):
        started(tiny_model, bucket_grid=f"fitted:{tmp_path / 'none.json'}")


def recorded(file: Path, prompts: dict[tuple[int, ...], int], decodes: int = 200) -> Path:
    """Traffic of these prompts (and how often each came), with decodes of two blocks."""
    recorder = TrafficRecorder(AXES[Phase.PROMPT])
    for shape, count in prompts.items():
        recorder.record(shape, count)
    recorder.save(file)
    recorder = TrafficRecorder(AXES[Phase.DECODE])
    recorder.record((1, 2), decodes)
    recorder.save(decode_file(file))
    return file


def test_a_missing_file_to_fit_to_is_named_as_it_was_given(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The error named a variable that nobody had set."""
    for name in ("none.json", "none.txt"):
        with pytest.raises(ConfigError, match=rf"^bucket_grid fitted:\S*/{name} is not a file"):
            started(tiny_model, bucket_grid=f"fitted:{tmp_path / name}")


@pytest.mark.parametrize("grid", ["learn", "fitted:t.json"])
def test_a_bucket_file_beside_a_fit_is_an_error(tiny_model: Path, grid: str) -> None:
    """The bucket file was used, and the log told of what was learned."""
    environ = {"VLLM_BUCKETING_FROM_FILE": "b.txt"}
    with pytest.raises(ConfigError) as raised:
        EngineConfig.from_env(environ, model=str(tiny_model), bucket_grid=grid)
    assert str(raised.value) == (
        f"bucket file b.txt (VLLM_BUCKETING_FROM_FILE) and bucket_grid {grid} both choose the "
        "buckets: leave one out"
    )


def test_the_log_tells_where_buckets_are_from(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It said that they were from variables, of which none was set."""
    file = recorded(tmp_path / "t.json", {(1, 21, 0): 200})
    with caplog.at_level(logging.INFO):
        started(tiny_model, bucket_grid=f"fitted:{file}")
        learning = {"bucket_grid": "learn", "record_traffic": file, "on": Padding()}
        started(tiny_model, **learning)
        started(tiny_model, {"VLLM_BUCKETING_STRATEGY": "lin"})
    said = [m.partition(" decode buckets ")[2] for m in caplog.messages if " prompt and " in m]
    assert [source for source in said if source] == [
        f"(from {file}, {decode_file(file)})",
        f"(learned from {file})",
        "(from the VLLM_* bucketing settings)",
    ]


def test_what_is_learned_is_compared_with_the_buckets_that_the_server_had(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was compared with ``exp``, also where the device has another default."""
    file = recorded(tmp_path / "t.json", {(1, 21, 0): 200})
    plain = started(tiny_model, on=Padding())
    learn = {"bucket_grid": "learn", "record_traffic": file, "on": Padding()}
    with caplog.at_level(logging.INFO):
        started(tiny_model, **learn)
        started(tiny_model, {"VLLM_DECODE_BUCKETING_STRATEGY": "lin"}, **learn)
    device, chosen = (m for m in caplog.messages if m.startswith("Buckets are learned from"))
    # 21 tokens are padded to 64 in the default grid of this device: 64 / 21 - 1.
    assert re.search(
        rf"in place of {plain.facts.num_buckets} buckets that pad 204.8% of prompts and \S+ of "
        "decodes with the default of this device$",
        device,
    )
    assert chosen.endswith("of decodes with exp for prompts and lin for decodes")


@pytest.mark.parametrize(
    ("usable", "decodes", "said"),
    [
        (LEARN_FROM - 1, 200, "99 prompt and 200 decode batches are within the limits"),
        (200, LEARN_FROM - 1, "1200 prompt and 99 decode batches are recorded in"),
    ],
)
def test_a_grid_is_learned_from_enough_batches_of_each_phase_within_the_limits(
    tiny_model: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    usable: int,
    decodes: int,
    said: str,
) -> None:
    """One batch was enough beside many of a larger server."""
    file = recorded(tmp_path / "t.json", {(1, 21, 0): usable, (1, 8000, 0): 1000}, decodes)
    learn = {"bucket_grid": "learn", "record_traffic": file, "on": Padding()}
    with caplog.at_level(logging.INFO):
        core = started(tiny_model, **learn)
        assert re.search(f"Nothing learned yet: .*{said}", caplog.text)
        assert core.executor.worker.grids.prompt.values("query") == (64,), "as without"
        caplog.clear()
        recorded(file, {(1, 21, 0): LEARN_FROM, (1, 8000, 0): 1000})
        core = started(tiny_model, **learn)
    assert core.executor.worker.grids.prompt.values("query") == (24, 64)
    assert "Buckets are learned from 100 prompt and 200 decode batches" in caplog.text
    assert caplog.text.count("1000 of 1100 recorded shapes are above the limits") == 1


def test_graphs_are_ordered_by_the_traffic_that_buckets_are_fitted_to(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Not by the empty file in which the server records."""
    served = recorded(tmp_path / "a.json", {(1, 21, 0): 200})
    other = recorded(tmp_path / "b.json", {(1, 50, 0): 7})
    for grid, file, count in (
        (f"fitted:{served}", None, 200),
        (f"fitted:{served}", tmp_path / "new.json", 200),
        (f"fitted:{served}", other, 200),
        ("paged", other, 7),
        ("learn", other, 7),
    ):
        config = EngineConfig(model=str(tiny_model), bucket_grid=grid, record_traffic=file)
        assert served_traffic(config)[Phase.PROMPT].total == count
    TrafficRecorder(AXES[Phase.PROMPT]).save(tmp_path / "empty.json")
    config = EngineConfig(model=str(tiny_model), record_traffic=tmp_path / "empty.json")
    assert served_traffic(config) == {}, "of which the log warns"


class Padding(CPUDevice):
    """A CPU that pads prompts, as all other devices do."""

    def optimize(self, model: nn.Module) -> None:
        self.attention = BlockAttention()


def test_a_restart_learns_from_what_was_served_and_tells_what_it_saves(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda name: str(tmp_path / name))
    learn = {"bucket_grid": "learn", "on": Padding()}
    with caplog.at_level(logging.INFO):
        first = started(tiny_model, **learn)
        assert "Nothing learned yet: 0 prompt and 0 decode batches are recorded" in caplog.text
        serve(first, [17, 33] * 51, max_tokens=2)
        first.close()
        padded = first.stats.num_padded_tokens
        assert padded > 0
        second = started(tiny_model, **learn)
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
    (file,) = (file for file in files if file.suffix == ".json" and ".decode." not in file.name)
    assert TrafficRecorder.load(file).total >= 204, "a server that has learned goes on recording"


def test_where_nothing_is_padded_nothing_is_learned(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log told of a learned grid that no decode used."""
    learn = {"bucket_grid": "learn", "device": "cpu", "record_traffic": tmp_path / "t.json"}
    first = started(tiny_model, **learn)
    serve_at_once(first, [17] * LEARN_FROM)
    first.close()
    with caplog.at_level(logging.INFO):
        second = started(tiny_model, **learn)
    assert "Nothing is learned: prompts and decodes run in their own sizes on cpu" in caplog.text
    assert not any(message.startswith("Buckets are learned") for message in caplog.messages)
    assert second.executor.worker.grids.decode.buckets == first.executor.worker.grids.decode.buckets
    second.close()
    assert TrafficRecorder.load(tmp_path / "t.json").total > 0, "for a device that pads"


class CompilingEachShape(CPUDevice):
    """A device whose prompts are ragged, and which compiles each shape that it runs."""

    dynamic_shapes = False


def test_where_prompts_are_ragged_decodes_alone_are_learned(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Buckets of prompts would pad more than such a device does without them."""
    file = tmp_path / "t.json"
    learn = {"bucket_grid": "learn", "on": CompilingEachShape(), "record_traffic": file}
    lengths = [17, 33] * 51
    with caplog.at_level(logging.INFO):
        first = started(tiny_model, **learn)
        assert "Nothing learned yet: 0 decode batches are recorded" in caplog.text
        serve_at_once(first, lengths)
        first.close()
        second = started(tiny_model, **learn)
    assert (first.executor.worker.grids.ragged, second.executor.worker.grids.ragged) == (True, True)
    (said,) = [message for message in caplog.messages if message.startswith("Buckets are learned")]
    assert re.match(
        r"Buckets are learned from \d+ decode batches: \d+ decode buckets that pad [\d.]+%, in "
        r"place of \d+ that pad [\d.]+%. Prompts stay ragged, which pads less than buckets of "
        r"prompts would$",
        said,
    )
    learned, before = (float(share) for share in re.findall(r"pad ([\d.]+)%", said))
    assert learned < before
    serve_at_once(second, lengths)
    assert second.stats.num_padded_tokens <= first.stats.num_padded_tokens
    assert second.stats.num_bucket_misses == 0
    serve(second, [1, 90, 128 - 3], max_tokens=3)
    assert second.stats.num_bucket_misses == 0, "what was never served has buckets, too"
    second.close()


def test_a_single_sequence_has_a_bucket_where_it_was_never_served(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Its program is another than that of more tokens: without a bucket, it is cold in traffic."""
    file = tmp_path / "t.json"
    recorder = TrafficRecorder(AXES[Phase.DECODE])
    for blocks in (9, 20, 33):
        recorder.record((4, blocks), 100)
    recorder.save(decode_file(file))
    device = CompilingEachShape()
    core = started(tiny_model, bucket_grid="learn", on=device, record_traffic=file)
    decodes = core.executor.worker.grids.decode
    assert decodes.values("batch") == (1, 4)
    assert decodes.find((1, 1)).shape[0] == 1
    assert decodes.describe()[0].startswith("Decode bucket config")
    core.close()


@pytest.mark.slow
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


def test_graphs_that_are_captured_in_traffic_have_the_order_of_what_was_served(
    lazy_gaudi: object, tiny_model: Path, tmp_path: Path
) -> None:
    small = {"max_model_len": 48, "max_num_seqs": 2, "max_num_batched_tokens": 16, "num_blocks": 13}
    file = recorded(tmp_path / "t.json", {(1, 16, 4): 200})
    core = started(
        tiny_model,
        {"VLLM_GRAPH_PROMPT_STRATEGY": "traffic"},
        **{**small, "device": "hpu", "record_traffic": file},
    )
    capture = core.executor.worker._live_capture()
    assert capture is not None
    served = core.executor.worker.grids.prompt.find((1, 16, 4))
    assert served != min(core.executor.worker.grids.prompt.buckets)
    assert next(capture.steps()).bucket == served
