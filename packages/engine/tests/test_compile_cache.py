"""Programs are compiled before a server needs them, and a bad cache costs time alone."""

from __future__ import annotations

import logging
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from torch import fx

from trencadis.bucketing import AxisConfig, BucketingConfig
from trencadis.engine import (
    CompileCacheReport,
    CompileError,
    ConfigError,
    EngineConfig,
    EngineCore,
    GenerateRequest,
    SamplingParams,
    check_compile_cache,
    fill_compile_cache,
)
from trencadis.engine.devices import CPUDevice, inductor
from trencadis.warmup import Phase

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = (tuple(range(40, 80)), (7,), tuple(range(100, 117)))
FEW_BUCKETS = BucketingConfig(
    prompt_batch=AxisConfig(min=1, step=1, max=1),
    prompt_query=AxisConfig(min=32, step=32, max=32),
    prompt_context=AxisConfig(min=16, step=16, max=16),
    decode_batch=AxisConfig(min=4, step=4, max=4),
    decode_blocks=AxisConfig(min=60, step=60, max=60),
)


def config(model: Path, cache: Path | None, **changes: object) -> EngineConfig:
    settings = {
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "block_size": 8,
        "num_blocks": 60,
        "bucketing": FEW_BUCKETS,
        "compile_cache": None if cache is None else str(cache),
        **changes,
    }
    return EngineConfig(model=str(model), **settings)


def served(core: EngineCore) -> list[list[int]]:
    """The tokens of every prompt."""
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    for number, prompt in enumerate(PROMPTS):
        core.add(str(number), GenerateRequest(prompt, GREEDY))
    while core.has_work:
        for token in core.step():
            tokens[int(token.key)].append(token.token_id)
    return tokens


def started(model: Path, cache: Path, **changes: object) -> EngineCore:
    core = EngineCore(config(model, cache, compile=True, **changes))
    core.warm_up()
    return core


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[list[int]]:
    core = EngineCore(config(tiny_model, None, compile=False))
    core.warm_up()
    return served(core)


@pytest.fixture(scope="module")
def shipped(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, CompileCacheReport]:
    """A cache that was filled without serving."""
    cache = tmp_path_factory.mktemp("shipped") / "cache"
    return cache, fill_compile_cache(config(tiny_model, cache))


@pytest.fixture
def copied(shipped: tuple[Path, CompileCacheReport], tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(shipped[0], tmp_path / "cache"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a disk of a size, and ends it."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"mode=0755,{options}", "none", str(place)]
        if subprocess.run(command, check=False, capture_output=True).returncode:
            pytest.skip("this user may not mount a disk")
        return place

    yield mount
    subprocess.run(["umount", "-l", str(place)], check=False, capture_output=True)


@pytest.mark.slow
def test_a_start_with_a_filled_cache_compiles_nothing(
    tiny_model: Path, shipped: tuple[Path, CompileCacheReport], expected: list[list[int]]
) -> None:
    cache, report = shipped
    assert (report.num_buckets, report.num_compiled, report.missing) == (2, 1, ())
    assert list(cache.rglob("*.gch")) == [], "headers are precompiled for as long as it takes"
    assert sum(path.stat().st_size for path in cache.rglob("*") if path.is_file()) < 10 << 20
    core = started(tiny_model, cache)
    assert core.executor.device.num_compilations() == 0
    assert served(core) == expected


@pytest.mark.slow
def test_programs_are_the_same_without_space_for_precompiled_headers(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inductor, "_HEADER_BYTES", 1 << 60)
    core = started(tiny_model, tmp_path)
    assert core.executor.device.num_compilations() == 1
    monkeypatch.undo()
    assert started(tiny_model, tmp_path).executor.device.num_compilations() == 0


@pytest.mark.slow
def test_a_filled_cache_may_be_read_only(
    tiny_model: Path,
    copied: Path,
    small_disk: Callable[[str], Path],
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    disk = small_disk("size=64m")
    shutil.copytree(copied, disk / "cache")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    core = started(tiny_model, disk / "cache")
    assert core.executor.device.num_compilations() == 0
    assert served(core) == expected
    assert warnings(caplog) == []
    assert not (tmp_path / "home").exists(), "the kernel of decode attention is in the cache, too"
    assert check_compile_cache(config(tiny_model, disk / "cache")).missing == ()


@pytest.mark.slow
def test_a_check_lists_the_buckets_without_a_program_and_compiles_nothing(
    tiny_model: Path, copied: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config(tiny_model, copied, record_traffic=copied.parent / "t.json")
    assert check_compile_cache(settings) == CompileCacheReport(copied, 2, ())
    assert list(copied.parent.iterdir()) == [copied], "no traffic is recorded"
    longer = attrs.evolve(FEW_BUCKETS, prompt_query=AxisConfig(min=16, step=16, max=32))
    report = check_compile_cache(attrs.evolve(settings, bucketing=longer))
    assert (report.num_buckets, report.missing) == (3, ()), "they share a program"
    single = attrs.evolve(FEW_BUCKETS, decode_batch=AxisConfig(min=1, step=4, max=4))
    report = check_compile_cache(attrs.evolve(settings, bucketing=single))
    assert [(phase, bucket.shape) for phase, bucket in report.missing or ()] == [
        (Phase.DECODE, (1, 60))
    ]
    (archive,) = copied.glob("*.zip")
    archive.write_bytes(archive.read_bytes()[:-1])
    report = check_compile_cache(settings)
    assert [phase for phase, _ in report.missing or ()] == [Phase.PROMPT, Phase.DECODE]
    assert list(copied.glob("*.zip")) == [archive], "nothing is compiled"


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")
def test_a_cache_of_another_user_is_compiled_again_and_left_as_it_is(
    tiny_model: Path, copied: Path, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    for path in (copied, *copied.rglob("*")):
        os.chown(path, 65534, 65534)
    before = sorted(copied.rglob("*"))
    core = started(tiny_model, copied)
    assert core.executor.device.num_compilations() == 1
    assert served(core) == expected
    assert sorted(copied.rglob("*")) == before
    of_programs = [text for text in warnings(caplog) if text.startswith("Programs in")]
    assert len(of_programs) == 1
    assert str(copied) in of_programs[0]
    assert "--trust-compile-cache" in of_programs[0]
    core = started(tiny_model, copied, trust_compile_cache=True)
    assert core.executor.device.num_compilations() == 0
    assert served(core) == expected


@pytest.mark.slow
def test_a_flipped_bit_costs_one_compilation_and_one_warning(
    tiny_model: Path, copied: Path, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    archive = sorted(copied.glob("*.zip"))[0]
    content = bytearray(archive.read_bytes())
    content[len(content) // 2] ^= 1
    archive.write_bytes(content)
    core = started(tiny_model, copied)
    assert core.executor.device.num_compilations() == 1
    assert served(core) == expected
    (warning,) = warnings(caplog)
    assert str(archive) in warning
    assert check_compile_cache(config(tiny_model, copied)).missing == (), "it was replaced"


@pytest.mark.slow
def test_a_server_with_a_full_disk_serves_and_says_so_once(
    tiny_model: Path,
    small_disk: Callable[[str], Path],
    expected: list[list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = small_disk("size=64k")
    (disk / "other").write_bytes(bytes(30_000))
    core = started(tiny_model, disk)
    assert core.executor.device.num_compilations() == 1
    assert served(core) == expected
    (warning,) = (text for text in warnings(caplog) if "cannot be kept" in text)
    assert str(disk) in warning
    assert "free space there" in warning


@pytest.mark.slow
def test_where_no_file_can_be_written_the_layers_run_uncompiled(
    tiny_model: Path, tmp_path: Path, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """As where all disks are full: the compiler itself fails."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    core = EngineCore(config(tiny_model, tmp_path, compile=True))
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        core.warm_up()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert served(core) == expected
    assert core.executor.device.num_compilations() == 0
    assert any("cannot be compiled and runs eagerly" in text for text in warnings(caplog))


@pytest.mark.slow
def test_two_servers_fill_one_cold_directory(
    tiny_model: Path, tmp_path: Path, expected: list[list[int]]
) -> None:
    cache = tmp_path / "cache"
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from test_compile_cache import started, served\n"
        "core = started(Path(sys.argv[2]), Path(sys.argv[3]))\n"
        "print(core.executor.device.num_compilations(), served(core))\n"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent), str(tiny_model), str(cache)]

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    both = [start(), start()]
    printed = [process.communicate(timeout=500)[0] for process in both]
    assert set(printed) <= {f"1 {expected}\n", f"0 {expected}\n"}
    assert len(list(cache.glob("*.zip"))) == 1
    assert start().communicate(timeout=500)[0] == f"0 {expected}\n"


@pytest.mark.skipif("TRENCADIS_TEST_DEVICE" in os.environ, reason="the session keeps the device")
@pytest.mark.parametrize("mode", ["lazy", pytest.param("eager", marks=pytest.mark.slow)])
def test_a_check_on_a_gaudi_runs_the_buckets_and_lists_those_that_compile(
    stand_in: Callable[..., Any], tiny_model: Path, tmp_path: Path, mode: str
) -> None:
    cache = tmp_path / "recipes"

    def in_a_new_process(
        do: Callable[[EngineConfig], CompileCacheReport], buckets: BucketingConfig = FEW_BUCKETS
    ) -> CompileCacheReport:
        with stand_in(mode), pytest.MonkeyPatch.context() as patch:
            patch.delenv("PT_HPU_RECIPE_CACHE_CONFIG")
            return do(config(tiny_model, cache, device="hpu", bucketing=buckets))

    assert in_a_new_process(fill_compile_cache).num_compiled > 0
    files = sorted(cache.iterdir())
    assert in_a_new_process(check_compile_cache).missing == ()
    single = attrs.evolve(FEW_BUCKETS, decode_batch=AxisConfig(min=1, step=4, max=4))
    report = in_a_new_process(check_compile_cache, single)
    assert [(phase, bucket.shape) for phase, bucket in report.missing or ()] == [
        (Phase.DECODE, (1, 60))
    ]
    assert sorted(cache.iterdir()) == files, "nothing is added"


def test_a_program_that_cannot_be_compiled_leaves_the_tokens_as_they_are(
    tiny_model: Path, tmp_path: Path, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    class WithoutRoom(CPUDevice):
        def compiler_missing(self) -> None:
            return None

        def compile(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            del module, inputs
            raise CompileError("g++: No space left on device")

    core = EngineCore(config(tiny_model, tmp_path, compile=True, device=WithoutRoom()))
    core.warm_up()
    assert served(core) == expected
    (found,) = warnings(caplog)
    assert "runs eagerly, which is slower (g++: No space left on device)" in found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compile_cache": None}, "compile_cache names no directory"),
        ({"compile": False}, "nothing is compiled with --no-compile"),
        ({"use_buckets": False}, "compile needs buckets"),
    ],
)
def test_a_cache_that_could_not_be_filled_is_an_error(
    tiny_model: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    settings = config(tiny_model, tmp_path / "cache", **changes)
    with pytest.raises(ConfigError, match=message):
        fill_compile_cache(settings)
    assert not (tmp_path / "cache").exists()


def test_a_check_of_a_directory_that_does_not_exist_makes_none(
    tiny_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="is not a directory: make it with engine-serve warmup"):
        check_compile_cache(config(tiny_model, tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()


def test_a_device_that_neither_lists_nor_counts_programs_is_not_checked(
    tiny_model: Path, tmp_path: Path
) -> None:
    class Silent(CPUDevice):
        lists_programs = False

    with pytest.raises(ConfigError, match="device cpu cannot list the programs in"):
        check_compile_cache(config(tiny_model, tmp_path, device=Silent()))
