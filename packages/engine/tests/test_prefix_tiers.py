"""Tiers below the device: a small cache finds its prefixes again, and tokens stay the same."""

from __future__ import annotations

import errno
import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trencadis.engine import EngineConfig, GenerateRequest, SamplingParams
from trencadis.engine.core.config_payload import config_payload
from trencadis.engine.core.engine_core import EngineCore
from trencadis.engine.core.prefix_tiers import PrefixTiers
from trencadis.engine.core.reconfigure import ModelSwitcher
from trencadis.engine.errors import ConfigError
from trencadis.engine.ipc.messages import NewToken
from trencadis.kvcache import disk_tier

BLOCK = 8
MAX_TOKENS = 7
NUM_USERS, NUM_TURNS, TURN = 6, 4, 25


@pytest.fixture(scope="module")
def models(
    tmp_path_factory: pytest.TempPathFactory, make_tiny_model: Callable[..., Path]
) -> list[Path]:
    place = tmp_path_factory.mktemp("tiers")
    return [make_tiny_model(place / "one"), make_tiny_model(place / "two", initializer_range=0.5)]


def config_of(model: Path, tiers: str = "", **changes: Any) -> EngineConfig:
    given = {"dtype": "float32", "max_model_len": 192, "max_num_seqs": 4, "block_size": BLOCK}
    # Each of six users comes to 16 blocks.
    given |= {"num_blocks": 25, "device": "cpu", "kv_tiers": tiers}
    return EngineConfig(model=str(model), **given | changes)


class Served:
    """A core, and what it has answered."""

    def __init__(self, config: EngineConfig) -> None:
        self.core = EngineCore(config)
        self.answers: dict[str, list[int]] = {}

    def run(
        self,
        prompts: dict[str, tuple[int, ...]],
        salt: str | None = None,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        """Serve prompts together to their end."""
        # A tiny model computes a prefix faster than a busy disk loads it.
        self.core.scheduler.costs.prefill_s_per_token = 10.0
        for key, prompt in prompts.items():
            self.answers[key] = []
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
            self.core.add(key, GenerateRequest(prompt, params, cache_salt=salt))
        while self.core.has_work:
            for token in self.core.step():
                assert isinstance(token, NewToken)
                self.answers[token.key].append(token.token_id)
        assert not self.core.take_failures()

    def chat(self, first_turn: int = 0, num_turns: int = NUM_TURNS) -> None:
        """Users whose every prompt holds what they and the model have said before."""
        for turn in range(first_turn, first_turn + num_turns):
            for pair in range(0, NUM_USERS, 2):  # two at a time
                self.run({f"{user}-{turn}": self.prompt(user, turn) for user in (pair, pair + 1)})

    def prompt(self, user: int, turn: int) -> tuple[int, ...]:
        earlier = () if not turn else self.prompt(user, turn - 1)
        answered = self.answers[f"{user}-{turn - 1}"] if turn else ()
        start = 7 * user + 3 * turn
        return (*earlier, *answered, *(1 + (start + i) % 60 for i in range(TURN)))

    def wait_for(self, tier: Any, num_blocks: int) -> None:
        """Until a tier of a user has so many blocks: another thread stores them."""
        deadline = time.monotonic() + 60
        while len(tier.blocks) < num_blocks:
            assert time.monotonic() < deadline
            if self.core.has_work:
                self.core.step()
            time.sleep(0.001)

    @property
    def num_computed(self) -> int:
        return self.core.stats.num_prefill_tokens

    def close(self) -> None:
        self.core.close()


@pytest.fixture
def serve() -> Iterator[Callable[[EngineConfig], Served]]:
    started: list[Served] = []

    def start(config: EngineConfig) -> Served:
        started.append(Served(config))
        return started[-1]

    yield start
    for served in started:
        served.close()


def test_a_small_cache_with_tiers_computes_few_tokens_again(
    models: list[Path], tmp_path: Path, serve: Callable[[EngineConfig], Served]
) -> None:
    ample = serve(config_of(models[0], num_blocks=200))
    ample.chat()
    small = serve(config_of(models[0]))
    small.chat()
    assert small.num_computed > 1.5 * ample.num_computed
    for tiers in ("host:1", f"disk:{tmp_path}/a:1", f"host:0.00001,disk:{tmp_path}/b:1"):
        tiered = serve(config_of(models[0], tiers))
        tiered.chat()
        assert tiered.answers == ample.answers == small.answers
        assert tiered.num_computed <= 1.1 * ample.num_computed
        stats = tiered.core.stats
        used = stats.host_tier if "disk" not in tiers else stats.disk_tier
        assert used is not None
        assert used.num_loaded_blocks > 20
        assert used.num_errors == 0
        assert used.num_loaded_bytes == used.num_loaded_blocks * tiered.core.facts.block_bytes
        assert tiered.core.blocks.pool.num_used_blocks == 0


@pytest.mark.slow
def test_tokens_are_the_same_with_preemption_swaps_sleep_and_a_switch(
    models: list[Path], tmp_path: Path, serve: Callable[[EngineConfig], Served]
) -> None:
    tiers = f"host:0.00005,disk:{tmp_path}:1"
    tight: dict[str, Any] = {"num_blocks": 25, "num_host_blocks": 12, "max_num_seqs": 8}
    answers = {}
    for setting in ("", tiers):
        served = serve(config_of(models[0], setting, **tight))
        switcher = ModelSwitcher(served.core)
        served.chat(num_turns=2)
        # Six at once lack blocks: some are preempted, to be swapped or computed again.
        burst = {f"burst-{user}": served.prompt(user, 1) for user in range(NUM_USERS)}
        served.run(burst, max_tokens=60)
        assert served.core.stats.num_preemptions
        switcher.sleep(1)
        switcher.wake_up()
        served.chat(2, 2)
        first = dict(served.answers)
        other = config_of(models[1], setting, **tight)
        switcher.reconfigure_engine(config_payload(other), 1 << 30)
        served.chat()
        second = dict(served.answers)
        switcher.reconfigure_engine(config_payload(config_of(models[0], setting, **tight)), 1 << 30)
        served.chat()
        answers[setting] = first, second, served.answers
    stats = served.core.stats
    assert answers[""] == answers[tiers]
    assert answers[tiers][0] == answers[tiers][2] != answers[tiers][1]
    assert stats.disk_tier is not None
    assert stats.host_tier is not None
    assert stats.disk_tier.num_errors == stats.host_tier.num_errors == 0
    assert stats.host_tier.num_bytes <= 0.00005 * (1 << 30)
    assert stats.disk_tier.num_loaded_blocks + stats.host_tier.num_loaded_blocks > 20


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[3])
from pathlib import Path
from test_prefix_tiers import Served, config_of
served = Served(config_of(Path(sys.argv[1]), sys.argv[2]))
served.run({"system": tuple(range(1, 60)) * 2})
while served.core.stats.disk_tier.num_stored_blocks < 14:
    served.core.scheduler.costs.prefill_s_per_token = 10.0
    served.run({"more": (1, 2, 3)})
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_killed_engine_is_warm_when_it_starts_again(
    models: list[Path], tmp_path: Path, serve: Callable[[EngineConfig], Served]
) -> None:
    tiers = f"disk:{tmp_path}:1"
    arguments = [sys.executable, "-c", KILLED, str(models[0]), tiers, str(Path(__file__).parent)]
    ended = subprocess.run(arguments, check=False, timeout=300, capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    system = tuple(range(1, 60)) * 2
    cold = serve(config_of(models[0]))
    cold.run({"user": (*system, 5, 6)})
    warm = serve(config_of(models[0], tiers))
    warm.run({"user": (*system, 5, 6)})
    assert warm.answers == cold.answers
    assert cold.num_computed == len(system) + 2
    assert warm.num_computed <= BLOCK
    # Neither another tenant nor another model finds it.
    before = warm.num_computed
    warm.run({"tenant": (*system, 5, 6)}, salt="tenant")
    assert warm.num_computed - before == len(system) + 2
    warm.close()
    other = serve(config_of(models[1], tiers))
    other.run({"user": (*system, 5, 6)})
    assert other.num_computed == len(system) + 2
    other.close()
    # Nor a checkpoint whose weights were replaced since.
    for file in models[0].glob("*.safetensors"):
        os.utime(file, ns=(1, 1))
    changed = serve(config_of(models[0], tiers))
    changed.run({"user": (*system, 5, 6)})
    assert changed.num_computed == len(system) + 2


@pytest.mark.parametrize(
    "value",
    ["disk", "host", "host:", "host:0", "host:x", "host:nan", "host:-1", "disk::1", "ssd:1", ","],
)
def test_a_wrong_tier_is_named(value: str, models: list[Path]) -> None:
    with pytest.raises(ConfigError, match=r"kv_tiers '.*' cannot be used") as error:
        config_of(models[0], value)
    assert error.value.field == "kv_tiers"


def test_tiers_in_a_wrong_order_or_place_are_named(models: list[Path], tmp_path: Path) -> None:
    for value in ("disk:a:1,host:1", "host:1,host:1", "mine:Tier:1,host:1"):
        with pytest.raises(ConfigError, match="one of each kind, the host first"):
            config_of(models[0], value)
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        config_of(models[0], "host:1", enable_prefix_caching=False)
    file = tmp_path / "file"
    file.write_bytes(b"")
    with pytest.raises(ConfigError, match="give a directory that this user may write"):
        EngineCore(config_of(models[0], f"disk:{file}:1"))


OF_A_USER = '''
import os
from itertools import takewhile
from pathlib import Path
from trencadis.kvcache import TierCounters

made = []


class Remote:
    name = "remote"

    def __init__(self, limit_bytes):
        self.limit_bytes = limit_bytes
        self.counters = TierCounters()
        self.blocks = {}
        self.models = set()
        self.is_closed = False
        made.append(self)

    def wants(self, key):
        return key not in self.blocks

    def store(self, key, content):
        self.blocks[key] = b"".join(content)

    def num_leading(self, keys):
        count = 0
        for key in keys:
            if key not in self.blocks:
                break
            count += 1
        return count

    def load(self, key, content):
        stored, start = self.blocks[key], 0
        for piece in content:
            piece[:] = stored[start : start + piece.nbytes]
            start += piece.nbytes
        self.counters.num_loaded_blocks += 1
        return True

    def close(self):
        self.is_closed = True


class Shared(Remote):
    """Files that several processes write and read, as a connector between them."""

    def _file(self, key):
        return Path(__file__).with_name(key.hex())

    def wants(self, key):
        return not self._file(key).exists()

    def store(self, key, content):
        unfinished = self._file(key).with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(b"".join(content))
        unfinished.rename(self._file(key))

    def num_leading(self, keys):
        return sum(1 for _ in takewhile(lambda key: self._file(key).exists(), keys))

    def load(self, key, content):
        self.blocks[key] = self._file(key).read_bytes()
        return super().load(key, content)


class Raises(Remote):
    def store(self, key, content):
        raise RuntimeError("store")

    def num_leading(self, keys):
        return 0


class Loads(Remote):
    def load(self, key, content):
        raise RuntimeError("load")


class Looks(Remote):
    def num_leading(self, keys):
        raise RuntimeError("num_leading")


class Wants(Remote):
    def wants(self, key):
        raise RuntimeError("wants")


class Boasts(Remote):
    def num_leading(self, keys):
        return 1 << 20

    def load(self, key, content):
        return False


class Half:
    name = "half"

    def __init__(self, limit_bytes):
        self.counters = TierCounters()
'''


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / "tier_of_a_user.py").write_text(OF_A_USER)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("tier_of_a_user")
    del sys.modules["tier_of_a_user"]


def test_a_tier_of_a_user_serves_each_model_its_own_blocks_through_switches(
    models: list[Path], user_module: Any, serve: Callable[[EngineConfig], Served]
) -> None:
    """What the tier knows of a model is made anew on a switch: the same prompt finds nothing of the
    other one, and its own blocks again afterwards."""
    setting = "host:0.00001,tier_of_a_user:Remote:0.5"
    plain, served = serve(config_of(models[0])), serve(config_of(models[0], setting))
    (tier,) = user_module.made
    assert tier.limit_bytes == 1 << 29
    prompt = tuple(range(1, 60)) * 2
    for core in (plain, served):
        core.run({"a": prompt})
    switcher = ModelSwitcher(served.core)
    other = serve(config_of(models[1]))
    other.run({"a": prompt})
    num_blocks = (len(prompt) + MAX_TOKENS - 1) // BLOCK
    served.wait_for(tier, num_blocks)
    of_first = set(tier.blocks)
    switcher.reconfigure_engine(config_payload(config_of(models[1], setting)), 1 << 30)
    loaded = tier.counters.num_loaded_blocks
    served.run({"b": prompt})
    assert served.answers["b"] == other.answers["a"] != plain.answers["a"]
    assert tier.counters.num_loaded_blocks == loaded
    served.wait_for(tier, 2 * num_blocks)
    assert len(of_first) == num_blocks
    assert len(tier.blocks) == 2 * num_blocks
    switcher.reconfigure_engine(config_payload(config_of(models[0], setting)), 1 << 30)
    before = served.num_computed
    served.run({"c": prompt})
    assert served.answers["c"] == plain.answers["a"]
    assert served.num_computed - before <= BLOCK
    assert not tier.is_closed
    served.close()
    assert tier.is_closed


PREFILLS = """
import sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from test_prefix_tiers import Served, config_of
served = Served(config_of(Path(sys.argv[1]), "tier_of_a_user:Shared:1"))
served.run({"prompt": tuple(range(1, 60)) * 2}, max_tokens=1)
served.close()
"""


@pytest.mark.slow
def test_a_prompt_that_one_process_computed_is_decoded_by_another(
    models: list[Path], user_module: Any, tmp_path: Path, serve: Callable[[EngineConfig], Served]
) -> None:
    """Prefill and decode apart: a tier that both use hands the blocks over."""
    setting = "tier_of_a_user:Shared:1"
    plain, decode = serve(config_of(models[0])), serve(config_of(models[0], setting))
    arguments = [sys.executable, "-c", PREFILLS, str(models[0])]
    arguments += [str(tmp_path), str(Path(__file__).parent)]
    ended = subprocess.run(arguments, check=False, timeout=300, capture_output=True)
    assert ended.returncode == 0, ended.stderr
    for served in (plain, decode):
        served.run({"prompt": tuple(range(1, 60)) * 2}, max_tokens=40)
    assert decode.answers == plain.answers
    assert decode.num_computed <= BLOCK < plain.num_computed


@pytest.mark.parametrize("name", ["Raises", "Loads", "Looks", "Wants", "Boasts"])
def test_a_tier_of_a_user_that_is_wrong_ends_no_request(
    models: list[Path], user_module: Any, serve: Callable[[EngineConfig], Served], name: str
) -> None:
    plain, served = (
        serve(config_of(models[0])),
        serve(config_of(models[0], f"tier_of_a_user:{name}:1")),
    )
    for core in (plain, served):
        core.chat(num_turns=2)
    assert served.answers == plain.answers
    assert served.core.blocks.pool.num_used_blocks == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:Tier", "cannot be made .*ModuleNotFoundError"),
        ("tier_of_a_user:Missing", "cannot be made .*AttributeError"),
        ("tier_of_a_user:made", "cannot be made .*TypeError"),
        ("tier_of_a_user:Half", "has no wants, store, num_leading, load, close"),
    ],
)
def test_a_class_that_is_no_tier_is_named(
    models: list[Path], user_module: Any, tmp_path: Path, name: str, message: str
) -> None:
    disk = f"disk:{tmp_path}/kv:1"
    with pytest.raises(ConfigError, match=f"kv_tiers .*{message}") as error:
        EngineCore(config_of(models[0], f"{disk},{name}:1"))
    assert error.value.field == "kv_tiers"
    PrefixTiers(disk).close()  # its directory is free again


class FaultyDisk:
    """The module ``os`` of a disk tier, on a disk that is full or slow."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, file: int, content: memoryview) -> int:
        if self.fault == "full":
            os.write(file, content[: len(content) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._wait()
        return os.write(file, content)

    def readv(self, file: int, pieces: list[memoryview]) -> int:
        self._wait()
        return os.readv(file, pieces)

    def _wait(self) -> None:
        if self.fault == "slow":
            time.sleep(0.01)


@pytest.mark.parametrize("fault", ["full", "slow", "vanished"])
def test_serving_goes_on_when_the_disk_fails_meanwhile(
    models: list[Path],
    tmp_path: Path,
    serve: Callable[[EngineConfig], Served],
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    plain, served = serve(config_of(models[0])), serve(config_of(models[0], f"disk:{tmp_path}:1"))
    plain.chat()
    served.chat(num_turns=2)
    stats = served.core.stats.disk_tier
    assert stats is not None
    assert stats.num_errors == 0 < stats.num_stored_blocks
    monkeypatch.setattr(disk_tier, "os", FaultyDisk(fault))
    if fault == "vanished":
        shutil.rmtree(tmp_path / disk_tier.DIRECTORY)
    served.chat(2, 2)
    stats = served.core.stats.disk_tier
    assert stats is not None
    assert served.answers == plain.answers
    assert (stats.num_errors > 0) == (fault != "slow")
    if fault == "full":  # what was written of a block is removed
        assert not list((tmp_path / disk_tier.DIRECTORY).glob("tmp*"))
    assert served.core.blocks.pool.num_used_blocks == 0


def test_an_engine_that_sleeps_has_no_blocks_to_store(
    models: list[Path], serve: Callable[[EngineConfig], Served]
) -> None:
    """A step for them would run on a model without its device memory."""
    budget = {"num_blocks": 200, "max_num_seqs": 8, "max_num_batched_tokens": 2048}
    served = serve(config_of(models[0], "host:1", **budget))
    core = served.core
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    for user in range(8):  # more blocks than can be moved in one step
        prompt = tuple(1 + (7 * user + i) % 60 for i in range(150))
        core.add(str(user), GenerateRequest(prompt, params))
    core.step()
    core.step()
    switcher = ModelSwitcher(core)
    switcher.sleep(1)
    assert not core.has_work
    switcher.wake_up()
    served.run({"after": (1, 2, 3)})
