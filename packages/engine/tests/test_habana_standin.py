"""The stand-in for a Gaudi keeps the real one's rules: a violation of each is caught.

``habana_standin/README.md`` gives the source of each rule.
"""

from __future__ import annotations

import gc
import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trencadis.engine.models.rank_modules import gather_from_ranks, sum_over_ranks

DEVICE = torch.device("hpu")


def mark_step():
    from habana_frameworks.torch import core

    core.mark_step()


def capture(run, *inputs):
    graph = torch.hpu.HPUGraph()
    with torch.hpu.graph(graph):
        output = run(*inputs)
    return graph, output


# Lazy mode.


def test_nothing_is_computed_until_mark_step(lazy_gaudi):
    mark_step()
    computed = lazy_gaudi.computed
    total = torch.ones(3, device=DEVICE) + 1
    assert lazy_gaudi.num_pending > 0
    assert lazy_gaudi.computed == computed
    mark_step()
    assert lazy_gaudi.num_pending == 0
    assert total.tolist() == [2, 2, 2]


def test_a_host_read_computes_what_is_collected_and_is_counted(lazy_gaudi):
    mark_step()
    reads = lazy_gaudi.host_reads
    assert (torch.arange(4, device=DEVICE) * 2)[3].item() == 6
    assert lazy_gaudi.host_reads == reads + 1
    assert lazy_gaudi.num_pending == 0


def test_operations_take_effect_in_the_order_in_which_they_were_given(lazy_gaudi):
    values = torch.zeros(4, device=DEVICE)
    before = values + 1
    values[1:3] = 5
    view = values.view(2, 2)
    values.add_(view.flatten())
    mark_step()
    assert before.tolist() == [1, 1, 1, 1]
    assert view.tolist() == [[0, 10], [10, 0]]


def test_the_device_has_its_own_copy_of_what_the_host_sends(lazy_gaudi):
    host = torch.ones(2)
    sent = host.to(DEVICE)
    target = torch.zeros(2, device=DEVICE)
    target.copy_(host)
    host.zero_()
    assert sent.tolist() == target.tolist() == [1, 1]


def test_a_recipe_is_compiled_once_for_each_shape_and_constant(lazy_gaudi):
    def compiled(size, factor):
        given = torch.ones(size, device=DEVICE)
        mark_step()
        before = lazy_gaudi.compilations
        given * factor + given
        mark_step()
        return lazy_gaudi.compilations - before

    assert [compiled(*x) for x in ((3, 2), (3, 2), (5, 2), (3, 2), (5, 2), (3, 4))] == [
        *(1, 0, 1, 0, 0, 1)
    ]


def test_programs_that_are_wired_differently_are_different_recipes(lazy_gaudi):
    one, two = torch.ones(2, 7, device=DEVICE), torch.ones(2, 7, device=DEVICE)
    mark_step()
    before = lazy_gaudi.compilations
    for left, right in ((one, one), (one, two), (two, two), (two, one)):
        left - right
        mark_step()
    assert lazy_gaudi.compilations == before + 2


STEPS = {
    "compute": lambda made: made.append(torch.softmax(made[-1] * 2 - 1, -1)),
    "transpose": lambda made: made.append(made[-1].t()),
    "reshape": lambda made: made.append(made[-1].reshape(2, 8).flip(0).reshape(4, 4)),
    "the first again": lambda made: made.append(made[0]),
    "in place": lambda made: made[-1].mul_(2),
    "gather": lambda made: made.append(made[-1].index_select(0, made[0].argmax(1))),
    "write a row": lambda made: made[0][1].add_(made[-1][0].clone()),
    "write rows": lambda made: made[-1].__setitem__(slice(1, 3), made[0][:2].clone()),
}
WRITES_VIEWS = ("write a row", "write rows", "in place")


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=12), st.integers(0, 9))
def test_any_program_gives_what_the_cpu_gives(lazy_gaudi, names, seed):
    first = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
    host, sent = [first.clone()], [first.to(DEVICE)]
    for name in names:
        STEPS[name](host)
        STEPS[name](sent)
    for ours, theirs in zip(host, sent, strict=True):
        assert torch.equal(ours, theirs.cpu())


# Graphs.


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
@given(
    st.lists(st.sampled_from(sorted(set(STEPS) - set(WRITES_VIEWS))), min_size=1, max_size=12),
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
)
def test_any_replay_gives_what_the_cpu_gives(lazy_gaudi, names, seeds):
    def run(first):
        made = [first]
        for name in names:
            STEPS[name](made)
        return made[-1] + 0

    inputs = [torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    given_here = torch.zeros(4, 4, device=DEVICE)
    graph, output = capture(run, given_here)
    for values in inputs:
        given_here.copy_(values)
        graph.replay()
        assert torch.equal(output.cpu(), run(values))


def test_a_replay_computes_on_what_the_inputs_hold_now_and_compiles_nothing(lazy_gaudi):
    given = torch.zeros(3, device=DEVICE)
    graph, output = capture(lambda x: (x + 1) * 2, given)
    given.copy_(torch.tensor([1.0, 2.0, 3.0]))
    mark_step()
    before = lazy_gaudi.compilations
    graph.replay()
    assert output.tolist() == [4, 6, 8]
    assert lazy_gaudi.compilations == before


def test_a_graph_updates_state_that_it_was_given(lazy_gaudi):
    state = torch.zeros(4, 2, device=DEVICE)
    row, new = torch.tensor([1], device=DEVICE), torch.ones(1, 2, device=DEVICE)
    graph, _ = capture(lambda: state.index_copy_(0, row, new))
    row.copy_(torch.tensor([3]))
    graph.replay()
    assert state.sum(1).tolist() == [0, 2, 0, 2]


def test_a_graph_may_fill_what_it_allocates(lazy_gaudi):
    given = torch.zeros(3, device=DEVICE)
    graph, output = capture(lambda x: x + torch.ones((), device=DEVICE), given)
    given.copy_(torch.tensor([1.0, 2.0, 3.0]))
    graph.replay()
    assert output.tolist() == [2, 3, 4]


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.item(),
        lambda x: x.cpu(),
        lambda x: x.tolist(),
        bool,
        float,
        lambda x: x.to("cpu"),
        lambda x: torch.zeros(1).copy_(x),
        lambda x: torch.equal(x, x),
    ],
    ids=["item", "cpu", "tolist", "if", "float", "to", "copy_", "equal"],
)
def test_a_host_read_within_a_capture_is_refused(lazy_gaudi, read):
    from gaudi_standin import GraphViolation

    given = torch.ones(1, device=DEVICE)
    with pytest.raises(GraphViolation, match="host read"):
        capture(lambda x: read(x + 1), given)


@pytest.mark.parametrize(
    "send",
    [
        lambda x: x + torch.ones(3).to(DEVICE),
        lambda x: x.copy_(torch.ones(3)),
        lambda x: x + torch.tensor([1.0, 2.0, 3.0], device=DEVICE),
        lambda x: x[[0, 1]],
    ],
    ids=["to", "copy_", "tensor", "indices"],
)
def test_a_copy_from_the_host_within_a_capture_is_refused(lazy_gaudi, send):
    from gaudi_standin import GraphViolation

    given = torch.ones(3, device=DEVICE)
    with pytest.raises(GraphViolation, match="copy from the host"):
        capture(send, given)


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x.nonzero(),
        lambda x: torch.masked_select(x, x > 1),
        lambda x: x.unique(),
        lambda x: x[x > 1],
        lambda x: x.index_put_((x > 1,), x[0]),
        lambda x: x.repeat_interleave(x.int()),
    ],
    ids=["nonzero", "masked_select", "unique", "mask", "masked write", "repeat_interleave"],
)
def test_a_shape_that_depends_on_values_is_refused_within_a_capture(lazy_gaudi, run):
    from gaudi_standin import GraphViolation

    given = torch.tensor([0.0, 1.0, 2.0]).to(DEVICE)
    with pytest.raises(GraphViolation, match="depends on values"):
        capture(run, given)


def test_a_shape_that_depends_on_values_makes_the_host_wait_elsewhere(lazy_gaudi):
    given = torch.tensor([0.0, 1.0, 2.0]).to(DEVICE)
    reads = lazy_gaudi.host_reads
    kept = given[given > 0]
    assert lazy_gaudi.host_reads == reads + 1
    assert kept.tolist() == [1, 2]


def test_an_update_in_place_of_a_view_is_refused_within_a_capture(lazy_gaudi):
    from gaudi_standin import GraphViolation

    whole = torch.zeros(2, 3, device=DEVICE)
    with pytest.raises(GraphViolation, match="in place of a view"):
        capture(lambda: whole[1].add_(1))


def test_an_input_that_was_moved_is_noticed_at_the_next_replay(lazy_gaudi):
    from gaudi_standin import StorageMoved

    for move in (
        lambda x: setattr(x, "data", torch.ones(2, device=DEVICE)),
        lambda x: x.set_(torch.ones(2, device=DEVICE)),
    ):
        given = torch.zeros(2, device=DEVICE)
        graph, _ = capture(lambda x: x + 1, given)
        graph.replay()
        move(given)
        with pytest.raises(StorageMoved, match="another address"):
            graph.replay()


def test_an_output_read_after_the_next_replay_is_noticed(lazy_gaudi):
    from gaudi_standin import StaleOutput

    given = torch.zeros(2, device=DEVICE)
    graph, output = capture(lambda x: x + 1, given)
    graph.replay()
    first = output.detach()
    row = first[0]
    assert first.tolist() == [1, 1]
    graph.replay()
    for stale in (first, row):
        with pytest.raises(StaleOutput, match="after replay 2"):
            stale.tolist()
    with pytest.raises(StaleOutput):
        first + 1
    assert output.detach().tolist() == [1, 1]


def test_a_replay_on_inputs_of_another_size_is_refused(lazy_gaudi):
    graph, given = torch.hpu.HPUGraph(), torch.zeros(4, device=DEVICE)
    graph.capture_begin(dry_run=True)
    graph.mark_user_inputs([given])
    output = given + 1
    graph.capture_end()
    graph.replayV3([torch.ones(4, device=DEVICE)])
    assert output.tolist() == [2, 2, 2, 2]
    with pytest.raises(RuntimeError, match="Input Sizes is not same"):
        graph.replayV3([torch.ones(1, device=DEVICE)])


def test_marked_inputs_are_those_of_each_replay_and_are_not_held(lazy_gaudi):
    """Also what is read through a view, or written in place; it may lie elsewhere then."""

    def made():
        torch.manual_seed(0)
        weight, cache = torch.randn(3, 2), torch.zeros(4, 2)
        return weight.to(DEVICE), cache.to(DEVICE)

    weight, cache = made()
    rows, slots = torch.ones(1, 3, device=DEVICE), torch.tensor([2], device=DEVICE)
    graph = torch.hpu.HPUGraph()
    graph.capture_begin(dry_run=True)
    graph.mark_user_inputs([weight, cache])
    cache.index_copy_(0, slots, rows @ weight.view(3, 2))
    output = cache.sum()
    graph.capture_end()
    before = lazy_gaudi.memory.in_use
    del weight, cache
    gc.collect()
    assert lazy_gaudi.memory.in_use == before - 4 * (3 * 2 + 4 * 2)
    for factor in (1, 3):
        weight, cache = made()
        weight = weight * factor
        graph.replayV3([weight, cache])
        expected = weight.cpu().sum(0)
        assert torch.allclose(cache.cpu()[2], expected)
        assert torch.allclose(output.detach().cpu(), expected.sum())
    before = lazy_gaudi.memory.in_use
    del weight, cache
    gc.collect()
    assert lazy_gaudi.memory.in_use == before - 4 * (3 * 2), "what a replay wrote is held"
    graph.clear_inputs()
    gc.collect()
    assert lazy_gaudi.memory.in_use == before - 4 * (3 * 2 + 4 * 2)


def test_a_view_that_is_not_contiguous_is_copied_and_must_not_be_written(lazy_gaudi):
    from gaudi_standin import GraphViolation

    cache, slots = torch.zeros(4, 2, device=DEVICE), torch.tensor([2, 3], device=DEVICE)
    rows = torch.ones(2, 2, device=DEVICE)
    graph = torch.hpu.HPUGraph()
    graph.capture_begin(dry_run=True)
    graph.mark_user_inputs([rows, cache])
    cache.index_copy_(0, slots, rows)
    graph.capture_end()
    before = lazy_gaudi.counters.copied_bytes
    larger = torch.zeros(5, 2, device=DEVICE)
    graph.replayV3([rows, larger[:4]])
    assert larger.cpu()[2].tolist() == [1, 1]
    assert lazy_gaudi.counters.copied_bytes == before
    graph.replayV3([torch.tensor([[3.0, 4.0], [5.0, 6.0]]).to(DEVICE).t(), cache])
    assert cache.cpu()[2].tolist() == [3, 5]
    assert lazy_gaudi.counters.copied_bytes == before + 4 * 4
    with pytest.raises(GraphViolation, match="a view to write to"):
        graph.replayV3([rows, torch.zeros(4, 3, device=DEVICE)[:, :2]])


def test_a_dry_run_computes_nothing(lazy_gaudi):
    graph, given = torch.hpu.HPUGraph(), torch.zeros(4, device=DEVICE)
    mark_step()
    computed = lazy_gaudi.computed
    graph.capture_begin(dry_run=True)
    given.add_(1)
    graph.capture_end()
    assert lazy_gaudi.computed == computed
    graph.replay()
    assert given.tolist() == [1, 1, 1, 1]


def test_only_one_capture_is_under_way_and_no_replay_or_destruction_within_it(lazy_gaudi):
    from gaudi_standin import GraphViolation

    given = torch.zeros(2, device=DEVICE)
    other, _ = capture(lambda x: x + 1, given)
    for act, error, message in (
        (lambda: torch.hpu.HPUGraph().capture_begin(), RuntimeError, "already in progress"),
        (other.replay, RuntimeError, "Capture in progress"),
        (other.reset, GraphViolation, "destroyed"),
    ):
        with pytest.raises(error, match=message):
            capture(act)


def test_a_refused_capture_leaves_the_device_as_it_was(lazy_gaudi):
    given = torch.ones(2, device=DEVICE)
    with pytest.raises(RuntimeError):
        capture(lambda x: (x + 1).tolist(), given)
    assert not lazy_gaudi.capturing
    assert (given + 1).tolist() == [2, 2]


def test_a_wrapped_module_captures_once_for_each_shape(lazy_gaudi):
    module = torch.nn.Linear(4, 2).requires_grad_(requires_grad=False)
    expected = module.weight.clone(), module.bias.clone()
    wrapped = torch.hpu.wrap_in_hpu_graph(module.to(DEVICE), disable_tensor_cache=True)
    for size, new in ((1, 1), (3, 1), (1, 0), (3, 0)):
        rows = torch.randn(size, 4)
        sent = rows.to(DEVICE)
        mark_step()
        before = lazy_gaudi.compilations
        found = wrapped(sent)
        mark_step()
        # A copy into the graph's own input, where it is not the tensor of the capture, is one too.
        assert lazy_gaudi.compilations - before <= new + 1
        assert torch.allclose(found.cpu(), rows @ expected[0].T + expected[1])


# Memory.


def test_memory_is_taken_and_given_back_and_bounded(lazy_gaudi):
    free, total = torch.hpu.mem_get_info()
    held = torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE)
    view = held[10:]
    mark_step()
    assert torch.hpu.mem_get_info() == (free - (1 << 20), total)
    del held
    assert torch.hpu.mem_get_info() == (free - (1 << 20), total)
    del view
    assert torch.hpu.mem_get_info() == (free, total)
    with pytest.raises(RuntimeError, match="Allocation failed"):
        torch.empty(total + 1, dtype=torch.uint8, device=DEVICE)


def test_a_graph_holds_its_inputs_and_outputs_until_it_is_reset(lazy_gaudi):
    free = torch.hpu.mem_get_info()[0]
    given = torch.zeros(1 << 10, device=DEVICE)
    graph, output = capture(lambda x: torch.relu(x + 1) * 2, given)
    del given, output
    held = free - torch.hpu.mem_get_info()[0]
    assert held >= 4 << 10
    graph.reset()
    assert torch.hpu.mem_get_info()[0] == free


# The mode.


def test_the_default_mode_is_eager(stand_in, monkeypatch):
    with stand_in("eager"):
        from habana_frameworks.torch.utils.internal import is_lazy

        for value, lazy in (("1", True), ("0", False)):
            monkeypatch.setenv("PT_HPU_LAZY_MODE", value)
            assert is_lazy() is lazy
        monkeypatch.delenv("PT_HPU_LAZY_MODE")
        assert not is_lazy()


# What does not concern a graph.


def test_there_are_no_complex_numbers(lazy_gaudi):
    angles = torch.ones(2, device=DEVICE)
    with pytest.raises(RuntimeError, match="Complex datatype is not supported"):
        torch.polar(angles, angles)


def test_host_and_device_tensors_do_not_mix(lazy_gaudi):
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device=DEVICE) + torch.ones(3)
    with pytest.raises(TypeError, match=r"Tensor\.cpu"):
        torch.ones(3, device=DEVICE).numpy()


def test_a_tensor_says_where_it_is(lazy_gaudi):
    tensor = torch.ones(2, 3, device=DEVICE)
    assert tensor.device.type == tensor.t().device.type == tensor.float().device.type == "hpu"
    assert torch.zeros_like(tensor).device.type == tensor.new_zeros(1).device.type == "hpu"
    assert tensor.cpu().device.type == "cpu"


# Eager mode.


def test_eager_mode_computes_at_once_and_has_no_graphs(eager_gaudi):
    computed = eager_gaudi.computed
    torch.ones(3, device=DEVICE) + 1
    mark_step()
    assert eager_gaudi.computed > computed
    assert not hasattr(torch.hpu, "HPUGraph")


def test_a_compiled_region_is_one_recipe_for_each_shape(eager_gaudi):
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.SiLU(), torch.nn.Linear(8, 4))
    module = module.requires_grad_(requires_grad=False).to(DEVICE)
    compiled = torch.compile(module, backend="hpu_backend", dynamic=False)
    with torch.inference_mode():
        for size, new in ((2, 1), (2, 0), (5, 1), (2, 0), (5, 0)):
            rows = torch.randn(size, 4).to(DEVICE)
            expected = module(rows).cpu()
            before = eager_gaudi.compilations
            found = compiled(rows)
            assert eager_gaudi.compilations - before == new
            assert torch.equal(found.cpu(), expected)


def test_a_compiled_region_holds_no_host_read(eager_gaudi):
    """The compiler splits the function there: two regions, and a read between them."""

    def run(x):
        return x * 2 if (x + 1).sum() > 0 else x

    given = torch.ones(3, device=DEVICE)
    assert (given + 1).sum().item() > 0
    before, reads = eager_gaudi.compilations, eager_gaudi.host_reads
    compiled = torch.compile(run, backend="hpu_backend", dynamic=False)
    assert compiled(given).tolist() == [2, 2, 2]
    assert eager_gaudi.compilations == before + 2
    assert eager_gaudi.host_reads == reads + 2


# Kernels.


REPEATED = torch.tensor([0, 1, 1, 1])


def test_lazy_index_add_loses_repeated_indices_up_to_the_number_of_rows(lazy_gaudi):
    """A step of select, add and scatter; with more indices than rows another kernel is taken."""

    def added(rows):
        target = torch.zeros(rows, 2, device=DEVICE)
        target.index_add_(0, REPEATED.to(DEVICE), torch.ones(4, 2, device=DEVICE))
        return target[:2, 0].tolist()

    assert added(4) == added(9) == [1, 1]
    assert added(3) == [1, 3]


def test_eager_index_add_runs_on_the_host(eager_gaudi):
    before = eager_gaudi.counters.copy()
    target = torch.zeros(4, 2, device=DEVICE)
    target.index_add_(0, REPEATED.to(DEVICE), torch.ones(4, 2, device=DEVICE))
    assert target[:2, 0].tolist() == [1, 3]
    assert eager_gaudi.counters.since(before).cpu_fallbacks == {"index_add_": 1}


@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_index_put_copies_the_whole_tensor_and_index_copy_does_not(stand_in, mode):
    with stand_in(mode) as bridge:
        cache = torch.zeros(8, 2, 4, device=DEVICE)
        rows = torch.tensor([1, 5]).to(DEVICE)
        new = torch.ones(2, 2, 4, device=DEVICE)

        def copied(write):
            before = bridge.counters.copy()
            write()
            return bridge.counters.since(before).copied_bytes

        assert copied(lambda: cache.index_copy_(0, rows, new)) == 0
        assert copied(lambda: cache.index_put_((rows,), new)) >= cache.nbytes
        # With None: a coordinate in each dimension for every element.
        written = new.transpose(0, 1)
        assert (
            copied(lambda: cache.transpose(0, 1).__setitem__((slice(None), rows), written))
            == cache.nbytes + new.numel() * 3 * 4
        )
        assert cache.sum(dim=(1, 2)).tolist() == [0, 8, 0, 0, 0, 8, 0, 0]


def test_an_operation_without_a_kernel_runs_on_the_host_and_is_counted(lazy_gaudi):
    from gaudi_standin import GraphViolation

    values = torch.tensor([3.0, 1.0, 2.0]).to(DEVICE)
    before = lazy_gaudi.counters.copy()
    assert values.histc(3).tolist() == [1, 1, 1]
    counted = lazy_gaudi.counters.since(before)
    assert counted.cpu_fallbacks == {"histc": 1}
    assert counted.syncs >= 1
    with pytest.raises(GraphViolation, match="cpu fallback"):
        capture(lambda x: x.histc(3), values)


def test_index_reduce_has_a_kernel_for_the_maximum_alone(lazy_gaudi):
    target, values = torch.zeros(4, 2, device=DEVICE), torch.ones(4, 2, device=DEVICE)
    before = lazy_gaudi.counters.copy()
    target.index_reduce_(0, REPEATED.to(DEVICE), values, "amax")
    assert not lazy_gaudi.counters.since(before).cpu_fallbacks
    target.index_reduce_(0, REPEATED.to(DEVICE), values, "mean")
    assert lazy_gaudi.counters.since(before).cpu_fallbacks == {"index_reduce_": 1}


def test_the_norm_kernel_takes_three_dimensions_of_one_type(lazy_gaudi):
    from habana_frameworks.torch.hpex.normalization import FusedRMSNorm

    rows, gamma = torch.ones(1, 3, 4, device=DEVICE), torch.ones(4, device=DEVICE)
    assert FusedRMSNorm.apply(rows, gamma, 0.0).sum().item() == 12
    with pytest.raises(RuntimeError, match="3 dimensions, got 2"):
        FusedRMSNorm.apply(rows[0], gamma, 0.0)
    with pytest.raises(RuntimeError, match="bfloat16"):
        FusedRMSNorm.apply(rows.bfloat16(), gamma, 0.0)


def test_products_of_fp8_have_one_type_and_scales_of_rows_in_two_dimensions(eager_gaudi):
    ops, e4m3 = torch.ops.hpu, torch.float8_e4m3fn
    rows = torch.ones(3, 4, device=DEVICE)
    steps, _ = ops.cast_to_fp8_v2(rows, torch.tensor(2.0, device=DEVICE), False, False, e4m3)
    scales = torch.full((3, 1), 0.5, device=DEVICE)

    def product(a, b, scale=scales, bias=None):
        return ops.fp8_gemm_v2(a, False, b, True, None, torch.float32, scale, None, bias)

    assert product(steps, steps).tolist() == [[8.0] * 3] * 3
    with pytest.raises(RuntimeError, match=r"one of .float, bfloat16"):
        ops.cast_to_fp8_v2(rows.half(), None, False, False, e4m3)
    with pytest.raises(RuntimeError, match=r"float8_e4m3fn with torch\.float8_e5m2"):
        product(steps, steps.to(torch.float8_e5m2))
    with pytest.raises(RuntimeError, match=r"a bias of torch\.bfloat16 for torch\.float32"):
        product(steps, steps, bias=torch.ones(3, device=DEVICE).bfloat16())
    with pytest.raises(RuntimeError, match="scales of rows for 3 dimensions"):
        product(steps.unsqueeze(0), steps)
    with pytest.raises(RuntimeError, match=r"a scale of torch\.bfloat16"):
        product(steps, steps, scales.bfloat16())


def test_fp8_is_read_as_fp32_or_bf16(eager_gaudi):
    ops, e4m3 = torch.ops.hpu, torch.float8_e4m3fn
    rows = torch.tensor([1.0, 1.06, 500.0], device=DEVICE)
    steps, _ = ops.cast_to_fp8_v2(rows, 2.0, False, False, e4m3)
    assert ops.cast_from_fp8(steps, 0.5, torch.bfloat16).tolist() == [1.0, 1.0, 224.0]
    with pytest.raises(RuntimeError, match="output dtype must be equal to float or bfloat16"):
        ops.cast_from_fp8(steps, 0.5, torch.float16)
    with pytest.raises(RuntimeError, match=r"cast_from_fp8: torch\.float32"):
        ops.cast_from_fp8(rows, 0.5, torch.float32)


@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_rows_of_fp8_are_copied_and_selected(stand_in, mode):
    with stand_in(mode):
        held = torch.zeros(4, 2, dtype=torch.float8_e4m3fn, device=DEVICE)
        rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).to(torch.float8_e4m3fn).to(DEVICE)
        held.index_copy_(0, torch.tensor([3, 1]).to(DEVICE), rows)
        found = held.index_select(0, torch.tensor([0, 1, 3]).to(DEVICE)).cpu()
        assert found.float().tolist() == [[0, 0], [3, 4], [1, 2]]


@pytest.mark.parametrize(("name", "is_number"), [("GAUDI2", False), ("GAUDI3", True)])
def test_a_gaudi_2_has_no_numbers_beyond_240(eager_gaudi, monkeypatch, name, is_number):
    monkeypatch.setenv("GAUDI_STANDIN_NAME", name)
    large = torch.full((1, 1), 256.0).to(torch.float8_e4m3fn).to(DEVICE)
    product = torch.ops.hpu.fp8_gemm_v2(large, False, large, True, None, torch.float32)
    read = torch.ops.hpu.cast_from_fp8(large, 1.0, torch.bfloat16)
    assert product.isfinite().item() is read.isfinite().item() is is_number


@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_lazy_mode_stores_64_bit_integers_in_32_bits(stand_in, mode):
    with stand_in(mode):
        sent = torch.tensor([2**33 + 5, 7]).to(DEVICE)
        assert sent.tolist() == ([5, 7] if mode == "lazy" else [2**33 + 5, 7])


# What a step costs.


def test_a_step_is_counted(lazy_gaudi):
    mark_step()
    before = lazy_gaudi.counters.copy()
    sent = torch.ones(4, 2).to(DEVICE)
    doubled = sent * 2
    mark_step()
    counted = lazy_gaudi.counters.since(before)
    assert (counted.launches, counted.uploads, counted.upload_bytes) == (1, 1, 32)
    assert (counted.syncs, counted.downloads) == (0, 0)
    doubled.cpu()
    torch.hpu.synchronize()
    counted = lazy_gaudi.counters.since(before)
    assert (counted.syncs, counted.downloads, counted.download_bytes) == (2, 1, 32)
    assert counted.launches == 1


def test_a_copy_that_does_not_block_is_waited_for_once(lazy_gaudi):
    values = [torch.ones(2, device=DEVICE) * i for i in range(3)]
    before = lazy_gaudi.counters.copy()
    for value in values:
        value.to("cpu", non_blocking=True)
    event = torch.hpu.Event()
    event.record()
    event.synchronize()
    counted = lazy_gaudi.counters.since(before)
    assert (counted.downloads, counted.syncs) == (3, 1)


def test_eager_mode_starts_a_recipe_for_each_operation_and_a_region_starts_one(eager_gaudi):
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.SiLU(), torch.nn.Linear(8, 4))
    module = module.requires_grad_(requires_grad=False).to(DEVICE)
    rows = torch.ones(2, 4).to(DEVICE)
    compiled = torch.compile(module, backend="hpu_backend", dynamic=False)

    def launches(run):
        before = eager_gaudi.counters.copy()
        run(rows)
        return eager_gaudi.counters.since(before).launches

    with torch.inference_mode():
        compiled(rows)
        assert launches(module) == 3
        assert launches(compiled) == 1


def test_replays_without_a_tensor_cache_read_their_inputs_where_they_lie(lazy_gaudi):
    def launches(*, cached):
        wrapped = torch.hpu.wrap_in_hpu_graph_func(lambda x: x * 2, disable_tensor_cache=not cached)
        for value in (1.0, 2.0):
            given = torch.full((3,), value, device=DEVICE)
            mark_step()
            before = lazy_gaudi.counters.copy()
            found = wrapped(given)
            mark_step()
            counted = lazy_gaudi.counters.since(before)
            assert found.tolist() == [2 * value] * 3
        return counted.launches

    assert launches(cached=False) == 1
    assert launches(cached=True) == 2


def test_equal_layers_of_a_capture_share_a_recipe_if_a_step_is_marked_after_each(lazy_gaudi):
    def recipes(layers):
        weights = [torch.full((4, 4), 0.5, device=DEVICE) for _ in range(layers)]
        given = torch.ones(2, 4, device=DEVICE)
        mark_step()
        before = lazy_gaudi.counters.copy()

        def run(x):
            for weight in weights:
                x = torch.relu(x @ weight)
                mark_step()
            return x

        graph, output = capture(run, given)
        given.fill_(2.0)
        graph.replay()
        assert output[0, 0].item() == 2 * 2**layers
        return lazy_gaudi.counters.since(before).recipes

    assert recipes(2) > 0
    assert recipes(5) == 0


# Compiled regions.


def compiled(run):
    return torch.compile(run, backend="hpu_backend", dynamic=False)


@torch.inference_mode()
def count_region(bridge, run, *inputs):
    """What a second call of a compiled function costs."""
    function = compiled(run)
    function(*inputs)
    before = bridge.counters.copy()
    result = function(*inputs)
    return result, bridge.counters.since(before)


def test_a_compiled_region_keeps_index_copy_in_place_and_copies_other_updates(eager_gaudi):
    cache, new = torch.zeros(8, 4, device=DEVICE), torch.ones(2, 4, device=DEVICE)
    rows = torch.tensor([1, 5]).to(DEVICE)

    def write(cache, rows, new):
        return cache.index_copy_(0, rows, new).narrow(0, 0, 6) * 2

    result, counted = count_region(eager_gaudi, write, cache, rows, new)
    assert result.sum().item() == 16
    assert cache.sum().item() == 8
    assert (counted.launches, counted.copied_bytes) == (1, 0)

    _, counted = count_region(eager_gaudi, lambda x, y: x.add_(y) * 2, cache[:2], new)
    assert counted.copied_bytes == new.nbytes


def test_a_compiled_region_is_broken_by_what_its_compiler_leaves_out(eager_gaudi, monkeypatch):
    monkeypatch.setenv("PT_HPU_USE_EAGER_FALLBACK", "1")
    values = torch.arange(8.0, device=DEVICE).view(4, 2)
    rows = torch.tensor([1, 3]).to(DEVICE)

    def select(values, rows):
        return (values * 2)[rows] + 1

    result, counted = count_region(eager_gaudi, select, values, rows)
    assert result.tolist() == [[5, 7], [13, 15]]
    assert counted.eager_fallbacks == {"index": 1}
    assert (counted.launches, counted.partitions) == (3, 2)

    def write(values, rows):
        values = values * 1
        values[:, rows[:1]] = 0.0
        return values

    _, counted = count_region(eager_gaudi, write, values, rows)
    assert counted.eager_fallbacks == {"index_put": 1}


def zero_columns(values, ids):
    values[:, ids] = 0.0
    return values


OUTSIDE = {
    "the compiler leaves it out": lambda x, ids: x[ids],
    "an index is None": lambda x, ids: zero_columns(x * 1, ids),
    "a scalar is NaN": lambda x, ids: (x + 1).clamp(float("nan")),
    "a scalar is a bool": lambda x, ids: torch.full((4,), True, device=x.device) & (ids[0] > 0),
    "int64 is not permuted": lambda x, ids: ids.view(1, 2).permute(1, 0) + 1,
    "not in hpu_op.yaml": lambda x, ids: torch.special.i1(x),
    "no kernel for these arguments": lambda x, ids: x.index_reduce(0, ids, x[:2], "mean"),
    "does not take torch.int64": lambda x, ids: ids.roll(1) + 1,
    "does not take torch.float16": lambda x, ids: torch.nan_to_num(x.half()),
}
"""Programs that a recipe cannot hold, by the reason."""


@pytest.mark.parametrize("reason", OUTSIDE)
def test_what_is_left_out_of_recipes_is_an_error_unless_fallbacks_are_allowed(
    eager_gaudi, monkeypatch, reason
):
    from gaudi_standin import PlacementViolation

    x, ids = torch.ones(4, 4, device=DEVICE), torch.tensor([0, 2]).to(DEVICE)
    with pytest.raises(PlacementViolation, match=reason):
        count_region(eager_gaudi, OUTSIDE[reason], x, ids)
    monkeypatch.setenv("PT_HPU_USE_EAGER_FALLBACK", "1")
    torch._dynamo.reset()
    _, counted = count_region(eager_gaudi, OUTSIDE[reason], x, ids)
    assert counted.eager_fallbacks.total() == 1


@pytest.mark.parametrize(
    ("run", "gathers", "read", "written"),
    [
        # 4 x 8 fp32 are 128 bytes, 2 rows of them 64, two ids 16.
        (lambda x, y, ids: x * 2 + y, 0, 256, 128),
        (lambda x, y, ids: (x * (y < 1)).sum(-1), 0, 256, 16),
        (lambda x, y, ids: torch.softmax(x * 2, -1) + y, 0, 128 + 256, 256),
        (lambda x, y, ids: x.index_select(0, ids) + 1, 1, 64 + 16 + 64, 128),
        (lambda x, y, ids: x[:, :1].expand(4, 8) + y, 0, 16 + 128, 128),
        (lambda x, y, ids: x.index_copy_(0, ids, y[:2]), 0, 64 + 16, 64),
    ],
    ids=["fused", "masked sum", "two passes", "gather", "repeated column", "in place"],
)
@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_gathers_and_bytes_of_a_program_are_counted(stand_in, mode, run, gathers, read, written):
    with stand_in(mode) as bridge, torch.inference_mode():
        x, y = (torch.ones(4, 8, device=DEVICE) for _ in range(2))
        ids = torch.tensor([0, 2]).to(DEVICE)
        mark_step()
        if mode == "eager":
            _, counted = count_region(bridge, run, x, y, ids)
        else:
            graph, _output = capture(lambda: run(x, y, ids))
            before = bridge.counters.copy()
            graph.replay()
            counted = bridge.counters.since(before)
            assert counted.replays == 1
        assert counted.gathers == gathers
        assert (counted.read_bytes, counted.written_bytes) == (read, written)


def test_an_operation_alone_reads_and_writes_whole_tensors(eager_gaudi):
    x = torch.ones(4, 8, device=DEVICE)
    before = eager_gaudi.counters.copy()
    (x * 2 + x).index_select(0, torch.tensor([0, 2], device=DEVICE))
    counted = eager_gaudi.counters.since(before)
    assert counted.gathers == 1
    assert (counted.read_bytes, counted.written_bytes) == (128 + 256 + 80, 256 + 64)


def test_traces_and_calls_of_the_compiler_are_counted(eager_gaudi):
    before = eager_gaudi.counters.copy()
    x = torch.ones(2, device=DEVICE)
    for _ in range(2):  # as two engines do
        function = compiled(torch.fx.symbolic_trace(lambda x: x * 3))
        function(x), function(x)
    counted = eager_gaudi.counters.since(before)
    assert (counted.compile_calls, counted.traces) == (2, 2)


def test_a_recipe_holds_no_view_to_another_dtype(eager_gaudi):
    from gaudi_standin import ScriptViolation

    words = torch.arange(6, dtype=torch.int32, device=DEVICE)
    assert count_region(eager_gaudi, lambda x: x.view(2, 3) + 1, words)[0].shape == (2, 3)
    with pytest.raises(ScriptViolation, match=r"of aten::view\.dtype"):
        count_region(eager_gaudi, lambda x: x.view(torch.float32) + 1, words)


@pytest.mark.skipif("TRENCADIS_TEST_DEVICE" in os.environ, reason="the session keeps it")
def test_the_stand_in_leaves_pytorch_as_it_was(stand_in):
    before = torch.Tensor.to, torch.tensor, torch.as_tensor, torch.compile
    with stand_in("lazy"):
        assert torch.hpu.is_available()
    assert (torch.Tensor.to, torch.tensor, torch.as_tensor, torch.compile) == before
    assert not hasattr(torch, "hpu")
    assert torch.ones(2).to("cpu").tolist() == [1, 1]


# Several devices.


@pytest.fixture
def one_rank(tmp_path, monkeypatch):
    """A group of one process, whose collective calls return what they are given."""
    import torch.distributed as dist

    def start():
        dist.init_process_group(
            "cpu:gloo,hpu:hccl", init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1
        )

    yield start
    dist.destroy_process_group()


def test_a_capture_rejects_collective_calls_unless_they_are_collected(
    lazy_gaudi, one_rank, monkeypatch
):
    from gaudi_standin import GraphViolation

    one_rank()
    given = torch.ones(3, device=DEVICE)
    monkeypatch.delenv("PT_HPU_ENABLE_LAZY_COLLECTIVES", raising=False)
    with pytest.raises(GraphViolation, match="collective nonSFG is not supported"):
        capture(lambda x: sum_over_ranks(x + 1), given)
    doubled = given * 2
    assert lazy_gaudi.num_pending > 0
    total = sum_over_ranks(doubled)  # which computes what is collected
    assert lazy_gaudi.num_pending == 0
    assert total.tolist() == [2, 2, 2]

    monkeypatch.setenv("PT_HPU_ENABLE_LAZY_COLLECTIVES", "true")
    before = lazy_gaudi.counters.copy()
    graph, output = capture(lambda x: sum_over_ranks(x + 1) * 3, given)
    counted = lazy_gaudi.counters.since(before)
    assert counted.collectives == 1
    assert counted.launches == 2, "who waits for a collective call ends a recipe"
    given.fill_(4)
    graph.replay()
    assert output.tolist() == [15, 15, 15]


def test_collective_calls_divide_a_region(eager_gaudi, one_rank):
    one_rank()
    x = torch.ones(2, 4, device=DEVICE)
    result, counted = count_region(eager_gaudi, lambda x: sum_over_ranks(x * 2) + 1, x)
    assert result.tolist() == [[3] * 4] * 2
    assert (counted.partitions, counted.collectives, counted.launches) == (2, 1, 3)
    assert counted.fallbacks == 0
    rows, counted = count_region(eager_gaudi, gather_from_ranks, x)
    assert rows.shape == (2, 4)
    assert (counted.partitions, counted.collectives) == (0, 1)


@pytest.mark.parametrize(
    ("variables", "module"),
    [
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "2"}, "1"),
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "2", "HABANA_VISIBLE_MODULES": "4,6"}, "6"),
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "2", "HLS_MODULE_ID": "3"}, "3"),
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "1"}, None),
        ({}, None),
    ],
)
def test_a_rank_takes_the_device_of_its_local_rank(lazy_gaudi, monkeypatch, variables, module):
    from habana_frameworks.torch.distributed import hccl

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "HABANA_VISIBLE_MODULES", "HLS_MODULE_ID"):
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    hccl.initialize_distributed_hpu()
    assert os.environ.get("HLS_MODULE_ID") == module
    if module == "6":
        monkeypatch.delenv("HLS_MODULE_ID")
        with pytest.raises(AssertionError, match="not enough devices"):
            hccl.initialize_distributed_hpu(world_size=4, rank=2, local_rank=2)
