"""What each rank has and is asked for, in one process: parts of weights, their sums, the calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from model_families import save_family
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from trencadis.engine import EngineConfig, ModelError, RankError
from trencadis.engine.devices import CPUDevice
from trencadis.engine.errors import EngineError
from trencadis.engine.ipc.messages import BUSY_SECONDS
from trencadis.engine.models import rank_modules
from trencadis.engine.models.adapter_files import LayerShape
from trencadis.engine.models.layer_spec import LayerSpec
from trencadis.engine.models.loader import inspect_model
from trencadis.engine.models.packed_weight import PackedWeight, QuantizedLinear
from trencadis.engine.models.rank_loading import DividedModel, divide
from trencadis.engine.models.rank_modules import RowExperts, RowLinear, SplitEmbedding, SplitHead
from trencadis.engine.models.rank_part import RankPart
from trencadis.engine.runner.executor import DeviceFacts, ExecutorCounters
from trencadis.engine.runner.ranks import rank_executor
from trencadis.engine.runner.ranks.rank_executor import RankExecutor
from trencadis.engine.runner.shared_blocks import SharedBlocks, StagingFiles, joined_contents
from trencadis.engine.runner.step import StepInput, StepResult
from trencadis.kvcache import CopyPlan

# The calls.

COUNTERS = ExecutorCounters(
    num_ready_buckets=1,
    num_graphs=2,
    num_padded_tokens=3,
    num_bucket_misses=4,
    num_cold_forwards=5,
    num_compilations=6,
)
FACTS = DeviceFacts("cpu", {"a": 1}, "source", (3,))


@attrs.frozen
class Facts:
    """In place of `ModelFacts`."""

    spec: object
    config: object
    block_bytes: int = 7


class Processes:
    """Notes each call, and gives what ``answers`` has for its method and the ranks asked."""

    def __init__(self, *given: Any, **named: Any) -> None:
        self.given, self.named = given, named
        self.calls: list[tuple[Any, ...]] = []
        self.steps: list[Any] = []
        self.answers: dict[str, Any] = {"device_facts": [FACTS, FACTS]}
        self.num_ends = 0
        self.error: Exception | None = None

    def call(
        self,
        method: str,
        *arguments: Any,
        limit_s: float,
        ranks: tuple[int, ...] = (0, 1),
        while_waiting: Callable[[], None] = lambda: None,
    ) -> list[Any]:
        self.calls.append((method, arguments, limit_s, ranks))
        if self.error is not None:
            raise self.error
        while_waiting()
        found = self.answers.get(method, ["first", "second"])
        return [found[rank] for rank in ranks]

    def fail(self, reason: str) -> RankError:
        return RankError(reason)

    def end(self) -> None:
        self.num_ends += 1

    def check_alive(self) -> None:
        self.calls.append(("check_alive",))

    def send_step(self, number: int, packed: object) -> str:
        if self.error is not None:
            raise self.error
        self.steps.append(packed)
        return f"sent {number}"

    def step_answer(self, sent: object, limit_s: float) -> Any:
        self.calls.append(("step_answer", sent, limit_s))
        return self.answers["step"]


CONFIG: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "device": "cpu",
    "kv_cache_memory": 101,
    "swap_space": 3.0,
    "hang_timeout": 20.0,
    "hang_restart_timeout": 10.0,
}
LIMIT_S = 18.0
"""Nine tenths of the longer one."""


@pytest.fixture
def started(tiny_model, monkeypatch) -> Callable[..., RankExecutor]:
    monkeypatch.setattr(rank_executor, "RankProcesses", Processes)

    def start(**changes: object) -> RankExecutor:
        return RankExecutor(EngineConfig(model=str(tiny_model), **{**CONFIG, **changes}))

    return start


def calls_of(executor: RankExecutor) -> list[tuple[Any, ...]]:
    found = list(executor.processes.calls)
    executor.processes.calls.clear()
    return found


def test_ranks_start_with_their_share_of_the_memory(started):
    executor = started()
    share, environments, limit_s, on_cold = executor.processes.given
    assert (share.kv_cache_memory, share.swap_space) == (50, 1.5)
    assert share.model == executor._config.model
    assert environments == [{}, {}]
    assert limit_s == LIMIT_S
    assert executor.processes.named == {"records": True, "cores": ()}
    assert calls_of(executor) == [("device_facts", (), 3600.0, (0, 1))]
    shapes: list[object] = []
    on_cold("before the core has set it")
    executor.on_cold = shapes.append
    on_cold("a shape")
    assert shapes == ["a shape"]
    assert (executor.is_asleep, executor.is_warming_up) == (False, False)
    assert executor.device_facts == FACTS


@pytest.mark.parametrize(
    ("memory", "swap", "of_rank"),
    [(None, None, (None, None)), (1, 0.0, (1, 0.0)), (4, 1.0, (2, 0.5)), (2, 2.0, (1, 1.0))],
)
def test_a_share_is_a_byte_at_least(started, memory, swap, of_rank):
    share = started(kv_cache_memory=memory, swap_space=swap).processes.given[0]
    assert (share.kv_cache_memory, share.swap_space) == of_rank


@pytest.mark.parametrize(
    ("hang", "restart", "limit_s"), [(10.0, 20.0, 18.0), (20.0, 10.0, 18.0), (20.0, 0.0, 3600.0)]
)
def test_a_step_is_given_up_before_the_front_gives_up_the_core(started, hang, restart, limit_s):
    executor = started(hang_timeout=hang, hang_restart_timeout=restart)
    assert executor.processes.given[2] == pytest.approx(limit_s)
    calls_of(executor)
    executor.probe()
    assert calls_of(executor) == [("probe", (), pytest.approx(limit_s), (0, 1))]


@pytest.mark.parametrize("binding", ["auto", "off"])
def test_ranks_are_bound_to_the_cores_of_their_nodes_where_asked(
    started, monkeypatch, caplog, binding
):
    monkeypatch.setattr(CPUDevice, "rank_cores", classmethod(lambda _, size: [(0, 1), (2, 3)]))
    with caplog.at_level("INFO"):
        executor = started(cpu_numa=binding)
    is_bound = binding == "auto"
    assert executor.processes.named["cores"] == ([(0, 1), (2, 3)] if is_bound else ())
    assert ("Rank 1 is bound to cores 2,3" in caplog.text) == is_bound


@pytest.mark.parametrize(
    ("of_ranks", "together"),
    [(((3,), (1, 2)), (1, 2, 3)), (((1,), (1,)), (1,)), ((None, (1,)), None), (((1,), None), None)],
)
def test_the_sensors_are_those_of_all_ranks(started, monkeypatch, of_ranks, together):
    facts = [attrs.evolve(FACTS, sensor_indices=indices) for indices in of_ranks]
    init = Processes.__init__

    def with_facts(self: Processes, *given: Any, **named: Any) -> None:
        init(self, *given, **named)
        self.answers["device_facts"] = facts

    monkeypatch.setattr(Processes, "__init__", with_facts)
    assert started().device_facts == attrs.evolve(FACTS, sensor_indices=together)


def test_a_model_is_loaded_by_all_ranks_from_memory_or_by_none(started):
    executor = started()
    config, share = executor._config, executor.processes.given[0]
    calls_of(executor)
    for kept in (True, False):
        executor.is_asleep = True
        executor.processes.answers["load"] = [kept, kept]
        assert executor.load(config) is kept
        assert not executor.is_asleep
    assert calls_of(executor) == [("load", (share,), 3600.0, (0, 1))] * 2
    executor.processes.answers["load"] = [True, False]
    with pytest.raises(RankError, match="some ranks alone had kept the weights"):
        executor.load(config)
    slower = attrs.evolve(config, hang_timeout=50.0)
    executor.processes.answers["load"] = [True, True]
    executor.load(slower)
    calls_of(executor)
    executor.probe()
    assert calls_of(executor) == [("probe", (), 45.0, (0, 1))]


def test_the_cache_of_a_model_has_blocks_of_all_ranks(started):
    executor = started()
    calls_of(executor)
    facts = Facts("spec", "of a rank")
    executor.processes.answers |= {
        "plan_memory": [facts, attrs.evolve(facts, spec="equal, not the same")],
        "models_in_memory": [(executor.processes.given[0],), ()],
    }
    assert not executor.has_weights(executor._config)
    assert executor.plan_memory() == Facts("spec", executor._config, 14)
    assert executor.has_weights(executor._config)
    assert calls_of(executor) == [
        ("plan_memory", (), BUSY_SECONDS, (0, 1)),
        ("models_in_memory", (), 60 + LIMIT_S, (0,)),
    ]
    executor.processes.answers["plan_memory"][1] = attrs.evolve(facts, block_bytes=8)
    with pytest.raises(RankError, match="rank 1 has planned another cache than rank 0"):
        executor.plan_memory()


def test_an_error_before_the_first_model_is_served_ends_the_ranks(started):
    executor = started()
    executor.processes.error = EngineError("planted")
    for method in (executor.plan_memory, lambda: executor.load(executor._config)):
        before = executor.processes.num_ends
        with pytest.raises(EngineError, match="planted"):
            method()
        assert executor.processes.num_ends == before + 1
    executor.processes.error = None
    executor.processes.answers["plan_memory"] = [Facts("spec", "c")] * 2
    executor.plan_memory()
    executor.processes.error = EngineError("planted")
    with pytest.raises(EngineError):
        executor.plan_memory()
    assert executor.processes.num_ends == 2, "later the core decides"


def test_a_warm_up_and_a_wake_up_can_be_ended(started):
    executor = started()
    executor.processes.answers |= {
        "warm_up": ["report", "another"],
        "counters": [COUNTERS, None],
        "wake": [Facts("spec", "c")] * 2,
        "models_in_memory": [(), ()],
    }
    calls_of(executor)
    assert executor.warm_up() == "report"
    assert calls_of(executor) == [
        ("warm_up", (), 3600.0, (0, 1)),
        ("counters", (), 60 + LIMIT_S, (0,)),
    ]
    assert executor.counters() == COUNTERS
    executor.is_asleep = True
    calls_of(executor)
    assert executor.wake().block_bytes == 14
    assert not executor.is_asleep
    assert [call[0] for call in calls_of(executor)] == ["wake", "counters", "models_in_memory"]
    for method in (executor.warm_up, executor.wake):
        with pytest.raises(RankError, match="was ended"):
            method(lambda: True)


def step(number: int = 4) -> StepInput:
    return StepInput(number, (), (), CopyPlan(), {})


def test_a_step_is_sent_once_and_its_counters_are_kept(started):
    executor = started()
    calls_of(executor)
    result = StepResult(token_ids={1: 2})
    executor.processes.answers["step"] = ({1: 2}, COUNTERS)
    assert executor.execute(step()).wait().token_ids == {1: 2}
    assert calls_of(executor) == [("step_answer", "sent 4", LIMIT_S)]
    assert executor.counters() == COUNTERS
    assert calls_of(executor) == [("check_alive",)]
    executor.processes.answers["step"] = (result, None)
    assert executor.execute(step(5)).wait() is result
    assert executor.counters() == COUNTERS, "those of the step before"


def test_counters_begin_at_zero(started):
    assert set(attrs.astuple(started().counters())) == {0}


def test_after_a_step_that_was_not_sent_what_ranks_know_is_packed_again(started):
    executor = started()
    packer = executor._packer
    executor.execute(step())
    assert executor._packer is packer
    executor.processes.error = RankError("planted")
    with pytest.raises(RankError):
        executor.execute(step(5))
    assert executor._packer is not packer


@pytest.mark.parametrize(
    ("method", "arguments", "ranks", "found"),
    [
        ("adapter_reader", (), (0,), "first"),
        ("hold_adapter", ("adapter",), (0, 1), "first"),
        ("holds_adapter", ("digest",), (0,), "first"),
        ("drop_adapter", ("digest",), (0, 1), None),
        ("pays_to_jump", (1, 2, 3), (0,), "first"),
        ("grid_usage", (), (0,), "first"),
    ],
)
def test_a_question_is_asked_of_those_who_know(started, method, arguments, ranks, found):
    executor = started()
    calls_of(executor)
    assert getattr(executor, method)(*arguments) == found
    assert calls_of(executor) == [(method, arguments, 60 + LIMIT_S, ranks)]


def test_memory_is_that_of_all_ranks_and_nothing_warms_up_in_the_background(started):
    executor = started()
    executor.processes.answers["memory_in_use"] = [3, 4]
    calls_of(executor)
    assert executor.memory_in_use() == 7
    assert calls_of(executor) == [("memory_in_use", (), 60 + LIMIT_S, (0, 1))]
    executor.advance_warm_up(idle=True)
    assert executor.missing_buckets() == ()
    assert executor.staging_blocks() == (), "there are no tiers"
    assert calls_of(executor) == []


def test_weights_are_moved_by_all_ranks_and_what_is_in_memory_is_noted(started, tiny_model):
    executor = started()
    first, share = executor._config, executor.processes.given[0]
    following = attrs.evolve(first, hang_timeout=50.0, kv_cache_memory=None)
    executor.processes.answers["models_in_memory"] = [(share,), ()]
    calls_of(executor)
    noted = ("models_in_memory", (), 60 + LIMIT_S, (0,))
    executor.put_aside(following, 1001)
    assert executor.is_asleep
    share_of_next = attrs.evolve(following, swap_space=1.5)
    assert calls_of(executor) == [("put_aside", (share_of_next, 500), 540.0, (0, 1))]
    executor.is_asleep = False
    executor.unload()
    assert calls_of(executor) == [("unload", (), 540.0, (0, 1)), noted]
    assert executor.has_weights(first)
    executor.processes.answers["load"] = [False, False]
    executor.load(following)
    calls_of(executor)
    executor.put_back()
    assert executor.is_asleep
    assert calls_of(executor) == [("put_back", (), 540.0, (0, 1)), noted]
    executor.is_asleep = False
    executor.sleep(2)
    assert executor.is_asleep
    assert calls_of(executor) == [("sleep", (2,), 540.0, (0, 1)), noted]


def test_a_model_without_weights_in_memory_is_checked_by_its_files(started, tmp_path):
    executor = started()
    other = attrs.evolve(executor._config, model=str(tmp_path))
    with pytest.raises(EngineError):
        executor.check(other)
    executor._in_memory = (attrs.evolve(other, kv_cache_memory=50, swap_space=1.5),)
    executor.check(other)


@pytest.mark.parametrize("error", [None, RankError("gone")])
def test_ranks_end_when_the_executor_is_closed(started, caplog, error):
    executor = started()
    executor.processes.error = error
    calls_of(executor)
    executor.close()
    assert executor.processes.num_ends == 1
    assert calls_of(executor) == [("close", (), 5.0, (0, 1))]
    assert ("cannot write what was recorded: gone" in caplog.text) == (error is not None)


# Blocks that other processes have.


def num_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_staging_blocks_of_all_ranks_are_one_after_the_other():
    pieces = []
    for rank in range(2):
        shared = SharedBlocks(3)
        memory = [shared.allocate(12), shared.allocate(6)]
        assert [file.block_bytes for file in shared.files] == [4, 2]
        assert all(bytes(each) == bytes(len(each)) for each in memory)
        for i, each in enumerate(memory):
            each[:] = bytes(range(100 * rank + 20 * i, 100 * rank + 20 * i + len(each)))
        pieces.append((StagingFiles(1, 2, tuple(shared.files)), memory))
    before = num_open_files()
    contents = joined_contents([files for files, _ in pieces])
    assert num_open_files() <= before + 4, "mappings alone"
    found = [[bytes(piece) for piece in block] for block in contents]
    starts = [[(4, 4), (22, 2), (104, 4), (122, 2)], [(8, 4), (24, 2), (108, 4), (124, 2)]]
    assert found == [[bytes(range(s, s + n)) for s, n in block] for block in starts]
    contents[0][0][0] = 77
    assert pieces[0][1][0][4] == 77, "it is the same memory"


def test_memory_that_cannot_be_had_leaves_no_file_open(monkeypatch):
    before = num_open_files()
    shared = SharedBlocks(2)
    with pytest.raises(OSError, match=r".+"):
        shared.allocate(-1)
    assert num_open_files() == before
    assert shared.files == []


# Modules of which each rank has a part.


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    rank_modules.use_sums(None)
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_sums_are_those_of_the_group_or_of_who_replaces_it():
    part = torch.randn(2, 3).t()
    assert torch.equal(rank_modules.sum_over_ranks(part), part)
    assert torch.equal(rank_modules.gather_from_ranks(part), part)
    assert rank_modules.least_over_ranks(-5) == rank_modules.most_over_ranks(-5) == -5
    rank_modules.use_sums(lambda given: given * 3 if given.shape[0] == 3 else None)
    assert torch.equal(rank_modules.sum_over_ranks(part), part * 3)
    assert torch.equal(rank_modules.sum_over_ranks(part.t()), part.t()), "None: not summed here"
    rank_modules.use_sums(None)
    assert torch.equal(rank_modules.sum_over_ranks(part), part)


@pytest.fixture
def parts(monkeypatch) -> Callable[[list[Callable[[], torch.Tensor]]], list[torch.Tensor]]:
    """Calls one rank after the other, whose sums and gathered rows are of the parts of all."""

    def of_ranks(calls: list[Callable[[], Any]]) -> list[Any]:
        own: list[list[torch.Tensor]] = []

        def note(part: torch.Tensor) -> torch.Tensor:
            own[-1].append(part)
            return part

        def note_rows(part: torch.Tensor) -> torch.Tensor:
            own[-1].append(part)
            return part.repeat(len(calls), 1)

        monkeypatch.setattr(rank_modules, "sum_over_ranks", note)
        monkeypatch.setattr(rank_modules, "gather_from_ranks", note_rows)
        for rank, call in enumerate(calls):
            monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
            monkeypatch.setattr(dist, "get_world_size", lambda: len(calls))
            own.append([])
            call()
        found = []
        for rank, call in enumerate(calls):
            monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
            turns = iter(range(len(own[0])))

            def of_all(
                part: torch.Tensor, rank: int = rank, turns: Iterator[int] = turns
            ) -> list[torch.Tensor]:
                turn = next(turns)
                assert torch.equal(part, own[rank][turn])
                return [each[turn] for each in own]

            monkeypatch.setattr(rank_modules, "sum_over_ranks", lambda part: sum(of_all(part)))
            monkeypatch.setattr(
                rank_modules, "gather_from_ranks", lambda part: torch.cat(of_all(part))
            )
            found.append(call())
        return found

    return of_ranks


@pytest.mark.parametrize("bias", [True, False])
def test_the_parts_of_a_layer_divided_by_inputs_add_to_the_whole(parts, bias):
    whole, rows = nn.Linear(6, 4, bias=bias), torch.randn(5, 6)
    calls = []
    for rank in range(3):
        own = nn.Linear(2, 4, bias=bias)
        own.weight = nn.Parameter(whole.weight[:, 2 * rank : 2 * rank + 2])
        own.bias = whole.bias
        layer = RowLinear(own)
        assert layer.bias is whole.bias
        calls.append(lambda layer=layer, rank=rank: layer(rows[:, 2 * rank : 2 * rank + 2]))
    for found in parts(calls):
        torch.testing.assert_close(found, whole(rows))


def test_the_parts_of_experts_are_added(parts):
    class Experts(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = factor

        def forward(self, rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
            return rows * self.factor + chosen

    rows, modules = torch.randn(3), [RowExperts(Experts(factor)) for factor in (1.0, 2.0)]
    calls = [lambda module=module: module(rows, torch.ones(3)) for module in modules]
    for found in parts(calls):
        torch.testing.assert_close(found, rows * 3 + 2)


@pytest.mark.parametrize("sizes", [(4, 3), (3, 3), (7, 0), (2, 2, 1)])
def test_each_token_has_the_vector_of_the_rank_that_has_it(parts, sizes):
    whole = nn.Embedding(sum(sizes), 5, padding_idx=1)
    token_ids, first, calls = torch.arange(sum(sizes)).view(1, -1), 0, []
    for size in sizes:
        own = nn.Embedding(max(size, 1), 5, padding_idx=0)
        own.weight = nn.Parameter(whole.weight[first : first + size])
        module = SplitEmbedding(own, first)
        assert module.weight is own.weight
        assert own.padding_idx is None
        if size:
            calls.append(lambda module=module: module(token_ids))
        first += size
    for found in parts(calls):
        assert torch.equal(found, whole(token_ids))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [(4, 4), (4, 3), (4, 1), (3, 3, 0)])
def test_logits_and_rows_of_tokens_are_those_of_the_whole_head(parts, sizes, bias):
    vocabulary = sum(sizes)
    whole, hidden = nn.Linear(6, vocabulary, bias=bias), torch.randn(2, 3, 6)
    heads, first = [], 0
    for size in sizes:
        own = nn.Linear(6, size, bias=bias)
        own.weight = nn.Parameter(whole.weight[first : first + size])
        own.bias = None if whole.bias is None else nn.Parameter(whole.bias[first : first + size])
        heads.append(SplitHead(own, vocabulary, sizes[0]))
        assert (heads[-1].in_features, heads[-1].weight) == (6, own.weight)
        first += size
    for found in parts([lambda head=head: head(hidden) for head in heads]):
        torch.testing.assert_close(found, whole(hidden))
    for found in parts([lambda head=head: head(hidden[:0]) for head in heads]):
        assert found.shape == (0, 3, vocabulary)
    tokens = [vocabulary - 1, 0, sizes[0] - 1, min(sizes[0], vocabulary - 1)]
    for weight, biases in parts([lambda head=head: head.rows_of(tokens) for head in heads]):
        assert torch.equal(weight, whole.weight[tokens])
        assert (biases is None) == (not bias)
        if bias:
            assert torch.equal(biases, whole.bias[tokens])


# The part of a model.

PLAN = {
    "model.embed_tokens": "embedding_rowwise",
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "model.layers.*.mlp.experts": "moe_tp_experts",
    "lm_head": "colwise_gather_output",
}
LAYER = "model.layers.1"


def divided(rank: int, size: int, *, kv_heads: int = 2) -> DividedModel:
    layer = LayerSpec(kv_heads=kv_heads, key_width=4, value_width=4, heads=8)
    part = RankPart(rank, size)
    shapes = {
        f"{LAYER}.self_attn.q_proj": LayerShape(16, 32),
        f"{LAYER}.self_attn.k_proj": LayerShape(16, 4 * kv_heads),
        f"{LAYER}.self_attn.v_proj": LayerShape(16, 4 * kv_heads),
        f"{LAYER}.self_attn.o_proj": LayerShape(32, 16),
        f"{LAYER}.mlp.gate": LayerShape(16, 5),
        "lm_head": LayerShape(16, 10),
    }
    return DividedModel(part, PLAN, [layer] * 2, [], shapes)


@pytest.mark.parametrize(
    ("name", "size", "rank", "inputs", "outputs"),
    [
        ("self_attn.q_proj", 2, 1, (0, 16), (16, 32)),
        ("self_attn.q_proj", 4, 2, (0, 16), (16, 24)),
        ("self_attn.k_proj", 2, 1, (0, 16), (4, 8)),
        ("self_attn.k_proj", 4, 1, (0, 16), (0, 4)),
        ("self_attn.v_proj", 4, 2, (0, 16), (4, 8)),
        ("self_attn.o_proj", 4, 3, (24, 32), (0, 16)),
        ("mlp.gate", 2, 1, (0, 16), (0, 5)),
    ],
)
def test_a_rank_keeps_its_inputs_and_outputs(name, size, rank, inputs, outputs):
    kept = divided(rank, size).kept(f"{LAYER}.{name}")
    assert [range(99)[each] for each in kept] == [range(*inputs), range(*outputs)]


@pytest.mark.parametrize(
    ("count", "size", "shares"),
    [
        (10, 2, [(0, 5), (5, 10)]),
        (10, 3, [(0, 4), (4, 8), (8, 10)]),
        (2, 4, [(0, 1), (1, 2), (2, 2), (2, 2)]),
    ],
)
def test_the_last_ranks_have_fewer_where_a_size_is_not_divided(count, size, shares):
    found = [divided(rank, size)._share(count) for rank in range(size)]
    assert [(each.start, each.stop) for each in found] == shares


@pytest.mark.parametrize(("size", "repeats"), [(2, False), (4, True)])
def test_heads_that_ranks_share_are_read_whole(size, repeats):
    arguments = divided(0, size).loading_arguments()["distributed_config"]
    assert arguments.tp_size == size
    shared = {name: "replicate" for name in PLAN if name.endswith(("k_proj", "v_proj"))}
    assert arguments.tp_plan == (shared if repeats else None)


def tiny(**changes: object) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        **{
            **{"vocab_size": 10, "hidden_size": 16, "intermediate_size": 12, "head_dim": 4},
            **{"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2},
            **{"attention_bias": True, "mlp_bias": True, **changes},
        }
    )
    return LlamaForCausalLM(config)


@pytest.mark.parametrize(("size", "rank"), [(2, 0), (2, 1), (4, 0), (4, 3)])
def test_a_model_becomes_plain_with_the_part_of_a_rank(size, rank):
    """Here its weights are whole, but those of key-value heads that ranks share."""
    model = tiny()
    for module in model.modules():
        vars(module)["forward"] = lambda *given: pytest.fail("wrapped by transformers")
    attention = model.model.layers[1].self_attn
    keys, queries, out = attention.k_proj, attention.q_proj, attention.o_proj
    whole = keys.weight.clone(), keys.bias.clone()
    queries.weight = nn.Parameter(queries.weight[:8])
    packed = QuantizedLinear(PackedWeight(torch.ones(3, 4, dtype=torch.int8), torch.ones(3, 1)))
    model.model.layers[0].mlp.down_proj = packed
    model.model.layers[0].mlp.experts = experts = nn.Identity()
    divided(rank, size).keep(model)
    assert not any("forward" in vars(module) for module in model.modules())
    embedding, head = model.model.embed_tokens, model.lm_head
    rows = -(-10 // size)
    assert (type(embedding), embedding.first) == (SplitEmbedding, rank * rows)
    assert (type(head), head.num_tokens, head.num_rows) == (SplitHead, 10, rows)
    assert type(attention.o_proj) is RowLinear
    assert attention.o_proj.linear is out
    assert type(model.model.layers[0].mlp.down_proj) is RowLinear
    assert model.model.layers[0].mlp.down_proj.linear is packed
    assert model.model.layers[0].mlp.experts.experts is experts
    assert (queries.out_features, queries.in_features) == (8, 16)
    first = rank * 2 // size * 4
    kept = slice(first, first + 4) if size > 2 else slice(8)
    assert torch.equal(keys.weight, whole[0][kept])
    assert torch.equal(keys.bias, whole[1][kept])
    assert keys.out_features == len(keys.weight)
    assert not keys.weight.requires_grad or size == 2


def test_packed_layers_are_left_out_of_the_plan_with_their_like_alone():
    model, plan = tiny(), dict(PLAN)
    packed = QuantizedLinear(PackedWeight(torch.ones(3, 4, dtype=torch.int8), torch.ones(3, 1)))
    name = "model.layers.0.mlp.down_proj"
    model.model.layers[0].mlp.down_proj = packed
    with pytest.raises(ModelError, match=r"layer model.layers.1.mlp.down_proj is not packed"):
        divided(0, 2).leave_whole([name], model, plan)
    model.model.layers[1].mlp.down_proj = packed
    plan = dict(PLAN)
    divided(0, 2).leave_whole([name], model, plan)
    assert set(PLAN) - set(plan) == {"model.layers.*.mlp.down_proj"}


def weight_of(outputs: int, inputs: int, groups: int = 1) -> PackedWeight:
    torch.manual_seed(0)
    steps = torch.randint(-8, 8, (outputs, inputs), dtype=torch.int8)
    return PackedWeight(steps, torch.rand(outputs, groups))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("name", "size"), [("q_proj", 2), ("k_proj", 2), ("k_proj", 4), ("v_proj", 4)]
)
def test_packed_outputs_are_those_of_the_rank(name, size, rank, bias):
    weight = weight_of(8, 16)
    given = nn.Parameter(torch.randn(8)) if bias else None
    part, own = divided(rank, size).packed_part(f"{LAYER}.self_attn.{name}", weight, given)
    first = 4 * rank if size == 2 else 4 * (rank * 2 // size)
    kept = slice(first, first + 4)
    assert torch.equal(part.unpacked(), weight.unpacked()[kept])
    assert (own is None) == (given is None)
    if own is not None and given is not None:
        assert torch.equal(own, given[kept])
        assert not own.requires_grad


@pytest.mark.parametrize("rank", [0, 1])
def test_packed_inputs_are_those_of_the_rank_with_the_whole_bias(rank):
    weight, bias = weight_of(6, 16, groups=4), nn.Parameter(torch.randn(6))
    part, own = divided(rank, 2).packed_part(f"{LAYER}.mlp.down_proj", weight, bias)
    assert own is bias
    assert torch.equal(part.unpacked(), weight.unpacked()[:, 8 * rank : 8 * rank + 8])


def test_a_packed_layer_that_is_not_divided_stays_whole():
    weight = weight_of(6, 16)
    assert divided(1, 2).packed_part(f"{LAYER}.mlp.gate", weight, None) == (weight, None)


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        (f"{LAYER}.self_attn.q_proj", (7, 16), "7 outputs are not 2 equal parts"),
        (f"{LAYER}.mlp.down_proj", (6, 15), "15 inputs are not 2 equal parts"),
        (f"{LAYER}.mlp.down_proj", (6, 18, 3), "9 of 18 inputs are not groups of 6"),
        ("lm_head", (6, 16), "its rule colwise_gather_output is not that of a packed layer"),
    ],
)
def test_a_packed_layer_that_cannot_be_divided_is_named(name, shape, reason):
    with pytest.raises(ModelError, match=rf"layer {name} cannot .* 2 ranks: {reason}\. Leave"):
        divided(0, 2).packed_part(name, weight_of(*shape), None)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (None, "transformers has no plan to divide it"),
        ({"a.*.x": "colwise_rep", "b": "local"}, "not supported: colwise_rep, local"),
        (
            {"model.layers.*.self_attn.k_proj": "replicate"},
            "does not divide queries, keys and values",
        ),
        (
            {"model.layers.*.self_attn.q_proj": "rowwise"},
            "does not divide queries, keys and values",
        ),
        ({"layers.*.x": "colwise_gather_output"}, "its plan gathers the outputs of a layer"),
    ],
)
def test_a_plan_that_ranks_cannot_follow_is_named(monkeypatch, change, reason):
    model = tiny()
    plan = {} if change is None else {**model.tp_plan, **change}
    monkeypatch.setattr(LlamaForCausalLM, "tp_plan", property(lambda _: plan))
    with pytest.raises(ModelError, match=f"tensor_parallel_size 2: .*{reason}"):
        divide(model.config, [], "m", RankPart(0, 2))


def test_a_divided_model_has_the_shapes_of_the_whole(tmp_path):
    spec = inspect_model(str(save_family("Llama", tmp_path)))
    model = divide(spec.config, spec.layers, "m", RankPart(1, 2))
    assert model.part == RankPart(1, 2)
    assert tuple(model.whole) == tuple(spec.layers)
    assert [each.heads * 2 for each in model.layers] == [each.heads for each in spec.layers]
    text = spec.config
    assert model.shapes["lm_head"] == LayerShape(text.hidden_size, text.vocab_size)
    for name in model.shapes:
        inputs, outputs = model.kept(name)
        whole = model.shapes[name]
        assert 0 <= inputs.stop <= whole.inputs
        assert 0 < outputs.stop <= whole.outputs
    assert set(model.plan.values()) >= {"colwise", "rowwise"}


@pytest.mark.parametrize(
    ("kv_heads", "size", "of_rank", "heads"),
    [
        (4, 2, 2, [[0, 1], [2, 3]]),
        (2, 2, 1, [[0], [1]]),
        (2, 4, 1, [[0], [0], [1], [1]]),
        (1, 2, 1, [[0], [0]]),
    ],
)
def test_heads_are_shared_equally_or_repeated(kv_heads, size, of_rank, heads):
    layer = LayerSpec(heads=8, kv_heads=kv_heads, key_width=4, value_width=4)
    for rank in range(size):
        part = RankPart(rank, size)
        [own] = part.layers_of([layer], "m")
        assert (own.heads, own.kv_heads) == (8 // size, of_rank)
        assert list(part.kv_heads_of(kv_heads)) == heads[rank]
        assert part.repeats_kv_heads([layer]) == (kv_heads < size)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "reason"),
    [(6, 4, "6 attention heads"), (8, 3, "3 key-value heads"), (8, 6, "6 key-value heads")],
)
def test_heads_that_ranks_cannot_share_are_named(heads, kv_heads, reason):
    layer = LayerSpec(heads=heads, kv_heads=kv_heads, key_width=4, value_width=4)
    with pytest.raises(ModelError, match=f"m cannot .*size 4, which does not divide its {reason}"):
        RankPart(0, 4).layers_of([layer], "m")
