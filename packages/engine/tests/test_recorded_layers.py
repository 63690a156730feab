"""Decode steps that are computed by their native calls: the same tokens, and no stale address."""

from __future__ import annotations

import ctypes
import itertools
import logging
import random
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from model_families import save_family
from torch import nn

from trencadis.engine import (
    LLM,
    EngineConfig,
    EngineCore,
    GenerateRequest,
    RequestFailed,
    SamplingParams,
)
from trencadis.engine.core.reconfigure import ModelSwitcher
from trencadis.engine.devices import CPUDevice
from trencadis.engine.devices.cpu import native_calls, recorded_layers
from trencadis.engine.devices.cpu.native_calls import (
    CallList,
    NotRecordable,
    Recording,
    Replayer,
    Scratch,
    recorded,
)
from trencadis.engine.devices.cpu.native_kernel import NoKernel
from trencadis.engine.devices.cpu.recorded_layers import RecordedLayers
from trencadis.engine.devices.cpu.router_products import load_router_functions
from trencadis.engine.devices.cpu.tiled_linear import (
    ByteLinear,
    IntegerLinear,
    TiledLinear,
    load_byte_kernel,
    load_linear_kernel,
)
from trencadis.engine.models.compiled_forward import OuterParts
from trencadis.engine.models.packed_weight import PackedWeight, QuantizedLinear
from trencadis.engine.models.paged_context import DecodeContext

from .conftest import SESSION_DEVICE, save_tiny_model

pytestmark = pytest.mark.skipif(SESSION_DEVICE is not None, reason="of the CPU device")


@pytest.fixture(scope="module", autouse=True)
def kernel() -> None:
    try:
        load_linear_kernel()
    except NoKernel as error:
        if "off by" in str(error):
            raise
        pytest.skip(f"this processor has no kernel: {error}")


@pytest.fixture(scope="module")
def replayer() -> Replayer:
    return Replayer()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


class Chain:
    """Linear layers that are computed one after the other, and recorded."""

    def __init__(
        self,
        replayer: Replayer,
        rows: int,
        *,
        scratch: Scratch | None = None,
        break_at: int | None = None,
    ) -> None:
        torch.manual_seed(0)
        sizes = (32, 64, 96, 32)
        self.layers = [
            TiledLinear(nn.Linear(inputs, outputs, dtype=torch.bfloat16))
            for inputs, outputs in itertools.pairwise(sizes)
        ]
        weights = [x for layer in self.layers for x in (layer.tiles, layer.bias)]
        self.scratch = scratch or Scratch()
        self.calls = CallList(weights, replayer, self.scratch)
        given = self.rows(rows)
        hidden = given
        with torch.inference_mode():
            for number, layer in enumerate(self.layers):
                with recorded() as recording:
                    hidden = layer(hidden)
                    if number == break_at:
                        hidden = hidden + 0
                self.calls.add(recording, (given,), hidden)
        self.calls.finish()

    @staticmethod
    def rows(count: int) -> torch.Tensor:
        return torch.randn(1, count, 32).bfloat16()

    def expected(self, given: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            for layer in self.layers:
                given = layer(given)
        return given

    def again(self, given: torch.Tensor) -> torch.Tensor:
        nothing = torch.zeros(0, 0, dtype=torch.int64).numpy()
        status, result = self.calls.run((given,), nothing)
        assert status == 0
        return result


@pytest.mark.parametrize("rows", [1, 2, 14, 33])
def test_calls_are_made_again_with_other_inputs(replayer: Replayer, rows: int) -> None:
    chain = Chain(replayer, rows)
    kept = []
    for _ in range(3):
        given = chain.rows(rows)
        chain.scratch.clear()
        kept.append((chain.again(given), chain.expected(given)))
    for result, expected in kept:  # no result is overwritten by a later run
        assert torch.equal(result, expected)


def test_a_run_gives_the_changing_arguments_anew(replayer: Replayer) -> None:
    chain = Chain(replayer, 4)
    given, layer = chain.rows(4), chain.layers[0]
    with torch.inference_mode(), recorded() as recording:
        result = layer(given)
    num_rows = recording.calls[0].arguments.index(4)
    recording.calls[0] = attrs.evolve(recording.calls[0], changing=range(num_rows, num_rows + 1))
    calls = CallList((layer.tiles, layer.bias), replayer, chain.scratch)
    calls.add(recording, (given,), result)
    calls.finish()
    for count in (2, 4, 3):
        chain.scratch.clear()
        _, rows = calls.run((given,), np.array([[count]]))
        assert torch.equal(rows[:, :count], result[:, :count])
        assert rows[:, count:].isnan().all()


def test_call_lists_share_memory_that_grows(replayer: Replayer) -> None:
    scratch = Scratch()
    chains = {rows: Chain(replayer, rows, scratch=scratch) for rows in (1, 40, 3)}
    alone = Chain(replayer, 40).scratch
    assert len(scratch.memory) == len(alone.memory), "as much as the largest needs"
    for rows, chain in (*chains.items(), *chains.items()):
        given = chain.rows(rows)
        scratch.clear()
        assert torch.equal(chain.again(given), chain.expected(given))


def packed_layer(kind: type, steps: torch.dtype, groups: int) -> Any:
    """A layer of 64 inputs and 40 outputs."""
    columns = 32 if steps is torch.uint8 else 64
    integers = torch.randint(0, 256, (40, columns), dtype=torch.uint8).view(steps)
    weight = PackedWeight(integers, torch.rand(40, groups) / 100)
    return kind(QuantizedLinear(weight, nn.Parameter(torch.randn(40).bfloat16())))


def product_of(dtype: torch.dtype) -> Any:
    load_router_functions()
    weight = torch.randn(40, 64, dtype=dtype)
    return (lambda rows: torch.ops.trencadis.plain_product(rows[0].to(dtype), weight)), (weight,)


KERNELS: dict[str, Callable[[], Any]] = {
    "bf16": lambda: TiledLinear(nn.Linear(64, 40, dtype=torch.bfloat16)),
    **{
        f"{kind.__name__} {steps} {groups}": lambda kind=kind, steps=steps, groups=groups: (
            packed_layer(kind, steps, groups)
        )
        for kind in (IntegerLinear, ByteLinear)
        for steps in (torch.int8, torch.uint8)
        for groups in (1, 2)
    },
    "product": lambda: product_of(torch.bfloat16),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("count", [1, 7])
def test_each_kernel_notes_one_call_that_can_be_made_again(
    replayer: Replayer, name: str, count: int
) -> None:
    try:
        for steps in (torch.int8, torch.uint8):
            load_byte_kernel(steps)
            load_linear_kernel(weights=steps)
    except NoKernel:
        pytest.skip("this processor has no kernel")
    torch.manual_seed(0)
    made = KERNELS[name]()
    if isinstance(made, nn.Module):
        compute, fixed = made, (*made.buffers(), *made.parameters())
    else:
        compute, fixed = made
    first, second = torch.randn(2, 1, count, 64).bfloat16()
    with torch.inference_mode():
        expected = compute(second)
        with recorded() as recording:
            result = compute(first)
        assert len(recording.calls) == 1
        compute(second)
        assert len(recording.calls) == 1, "not after the context"
    calls = CallList(fixed, replayer, Scratch())
    calls.add(recording, (first,), result)
    calls.finish()
    nothing = np.zeros((0, 0), dtype=np.int64)
    for given, wanted in ((first, result), (second, expected)):
        assert torch.equal(calls.run((given,), nothing)[1], wanted)


def test_the_largest_of_rows_note_their_call() -> None:
    load_router_functions()
    rows = torch.randn(3, 9)
    with recorded() as recording:
        values, indices = torch.ops.trencadis.largest_of_rows(rows, 2)
    expected = rows.topk(2)
    assert torch.equal(values, expected.values)
    assert torch.equal(indices, expected.indices)
    [call] = recording.calls
    assert call.arguments[-4:-1] == (3, 9, 2)
    assert [id(each) for each in recording.tensors] == [id(values), id(indices)]


def test_what_is_computed_by_others_cannot_be_recorded(replayer: Replayer) -> None:
    with pytest.raises(NotRecordable, match="no recorded call has made"):
        Chain(replayer, 2, break_at=1)


def test_an_input_that_is_not_contiguous_cannot_be_recorded(replayer: Replayer) -> None:
    calls = CallList((), replayer, Scratch())
    with pytest.raises(NotRecordable, match="not contiguous"):
        calls.add(Recording(), (torch.zeros(4, 4).T,), torch.zeros(1))


def test_nothing_is_recorded_after_an_error() -> None:
    with pytest.raises(RuntimeError, match="in between"), recorded():
        raise RuntimeError("in between")
    assert not native_calls.is_recording()


CONTEXT = DecodeContext(None, 0, *[torch.zeros(0)] * 5)  # type: ignore[arg-type]
"""Of a step in which nothing is attended to."""


def plus_one(layer: int, _: Any, args: tuple[Any, ...], __: dict[str, Any]) -> torch.Tensor:
    del layer
    return args[0] + 1


def call(layers: RecordedLayers, layer: int, hidden: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = layers(layer, print, (hidden,), {"paged": CONTEXT})
    return result


def doubled_between(layers: RecordedLayers, hidden: torch.Tensor) -> torch.Tensor:
    for layer in range(3):
        hidden = call(layers, layer, 2 * hidden)
    return hidden


def changed_in_place(layers: RecordedLayers, hidden: torch.Tensor) -> torch.Tensor:
    for layer in range(3):
        hidden = call(layers, layer, hidden)
        hidden *= 2
    return hidden


def one_left_out(layers: RecordedLayers, hidden: torch.Tensor) -> torch.Tensor:
    for layer in (0, 2):
        hidden = call(layers, layer, hidden)
    return hidden


def chained(layers: RecordedLayers, hidden: torch.Tensor) -> torch.Tensor:
    for layer in range(3):
        hidden = call(layers, layer, hidden)
    return hidden


def added_at_the_end(layers: RecordedLayers, hidden: torch.Tensor) -> torch.Tensor:
    first = hidden = call(layers, 0, hidden)
    for layer in (1, 2):
        hidden = call(layers, layer, hidden)
    return hidden + first


def test_programs_of_another_kind_are_not_recorded(
    replayer: Replayer, log: pytest.LogCaptureFixture
) -> None:
    layers = RecordedLayers(plus_one, [print] * 3, [(), (), ()], (), replayer)
    results = {chained(layers, torch.zeros(1, 1, 4))[0, 0, 0].item() for _ in range(3)}
    assert results == {3.0}
    assert log.text.count("the generated code of a program is not found") == 1


@pytest.mark.parametrize(
    "compute", [doubled_between, changed_in_place, one_left_out, added_at_the_end]
)
def test_a_model_that_does_more_than_to_chain_its_layers_is_not_recorded(
    replayer: Replayer, log: pytest.LogCaptureFixture, compute: Callable[..., torch.Tensor]
) -> None:
    layers = RecordedLayers(plus_one, [print] * 3, [(), (), ()], (), replayer)
    results = {compute(layers, torch.zeros(1, 1, 4))[0, 0, 0].item() for _ in range(3)}
    assert len(results) == 1
    assert log.text.count("different tensors, or something else uses these") == 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("bf16"))


@pytest.fixture
def recordings() -> Generator[list[RecordedLayers]]:
    """What the engines of a test record, in order."""
    made: list[RecordedLayers] = []
    with pytest.MonkeyPatch.context() as patch:
        init = RecordedLayers.__init__

        def noted(self: RecordedLayers, *given: Any) -> None:
            init(self, *given)
            made.append(self)

        patch.setattr(RecordedLayers, "__init__", noted)
        yield made


def answers(llm: LLM, seed: int = 0, count: int = 6, output: int = 40) -> list[Sequence[int]]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(4, 60) for _ in range(rng.randrange(3, 40))] for _ in range(count)]
    prompts[1] = prompts[0] + prompts[1]  # shares blocks
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    return [result.completions[0].token_ids for result in llm.generate(prompts, params)]


SETTINGS = {"device": "cpu", "dtype": "bfloat16", "compile": True, "warmup": "none"}


def engine(model: Path, **changes: Any) -> LLM:
    return LLM(str(model), **(SETTINGS | {"max_model_len": 128, "max_num_seqs": 8} | changes))


@pytest.fixture
def unrecorded(monkeypatch: pytest.MonkeyPatch, model: Path) -> list[Sequence[int]]:
    with monkeypatch.context() as patch:
        patch.setattr(CPUDevice, "record_layers", lambda self, run, *_: run)
        return answers(engine(model))


def lists_of(recordings: list[RecordedLayers]) -> int:
    return sum(len(layers._lists) for layers in recordings)


@pytest.fixture
def not_recorded(
    model: Path,
    unrecorded: list[Sequence[int]],
    recordings: list[RecordedLayers],
    log: pytest.LogCaptureFixture,
) -> Callable[[str], None]:
    """Asserts that an engine records nothing, says why, and gives the same tokens."""

    def check(reason: str) -> None:
        assert answers(engine(model)) == unrecorded
        assert lists_of(recordings) == 0
        assert reason in log.text

    return check


@pytest.mark.slow
def test_replayed_steps_give_the_same_tokens(
    model: Path, unrecorded: list[Sequence[int]], recordings: list[RecordedLayers]
) -> None:
    llm = engine(model)
    assert answers(llm) == unrecorded
    recorded_shapes = lists_of(recordings)
    assert recorded_shapes, "nothing was recorded"
    assert answers(llm) == unrecorded
    assert lists_of(recordings) == recorded_shapes, "the same steps were recorded again"


def model_of(llm: LLM) -> Any:
    return llm.core.executor.worker._model  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3, 6])
def test_steps_of_few_sequences_call_no_code_of_the_model(
    model: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(CPUDevice, "record_layers", lambda self, run, *_: run)
        expected = answers(engine(model), count=count)
    llm, calls = engine(model), []
    assert answers(llm, count=count) == expected
    model_of(llm).model.norm.register_forward_hook(lambda *_: calls.append(1))
    assert answers(llm, count=count) == expected
    assert len(calls) < 5 if count < 5 else len(calls) > 30, "all but the prompts are decodes"


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["logits", "layer_inputs", "of"])
def test_outer_parts_that_compute_something_else_are_not_used(
    model: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture, fault: str
) -> None:
    expected = answers(engine(model), count=2)
    right = getattr(OuterParts, fault)

    def wrong(*given: Any) -> Any:
        if fault == "of":
            raise RuntimeError("a model that cannot be traced")
        first, *others = right(*given)
        return [first + 1, *others]

    monkeypatch.setattr(OuterParts, fault, staticmethod(wrong) if fault == "of" else wrong)
    llm = engine(model)
    assert [answers(llm, count=2) for _ in range(2)] == [expected] * 2
    reason = "a model that cannot be traced" if fault == "of" else "its trace computes other"
    assert f"Decode steps of 2 sequences call the model's code: {reason}" in log.text


@pytest.mark.slow
def test_replayed_layers_attend_within_their_windows(
    tmp_path: Path,
    add_tokenizer: Callable[[Path], None],
    recordings: list[RecordedLayers],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two of four layers have a window of 32 tokens."""
    windowed = save_family("Qwen 2 with use_sliding_window", tmp_path)
    add_tokenizer(windowed)
    llm = engine(windowed, block_size=8)
    assert len(llm.core.facts.windows) == 2, "each layer is given the blocks of its group"
    replayed = [answers(llm) for _ in range(2)]
    assert lists_of(recordings), "nothing was recorded"
    with monkeypatch.context() as patch:
        patch.setattr(CPUDevice, "record_layers", lambda self, run, *_: run)
        other = engine(windowed, block_size=8)
        assert replayed == [answers(other) for _ in range(2)]  # the second time with prefix hits


@pytest.fixture(params=["Granite 4 (hybrid)", "Mamba 2"])
def with_states(
    request: pytest.FixtureRequest, tmp_path: Path, add_tokenizer: Callable[[Path], None]
) -> Path:
    made = save_family(request.param, tmp_path)
    add_tokenizer(made)
    return made


@pytest.mark.slow
def test_replayed_layers_advance_their_states(
    with_states: Path,
    recordings: list[RecordedLayers],
    monkeypatch: pytest.MonkeyPatch,
    log: pytest.LogCaptureFixture,
) -> None:
    """Sequences come and go, so that one has another row and another place in each step."""
    llm = engine(with_states, max_num_seqs=3)
    replayed = [answers(llm) for _ in range(2)]
    assert lists_of(recordings), log.text
    monkeypatch.setattr(CPUDevice, "record_layers", lambda self, run, *_: run)
    other = engine(with_states, max_num_seqs=3)
    assert replayed == [answers(other) for _ in range(2)]


@pytest.mark.slow
def test_states_of_a_cache_after_sleep_are_those_that_are_read(
    with_states: Path, recordings: list[RecordedLayers]
) -> None:
    core = EngineCore(EngineConfig(model=str(with_states), num_blocks=60, **SETTINGS))
    core.warm_up()
    switcher = ModelSwitcher(core)
    params = SamplingParams(temperature=0.0, max_tokens=30)

    def serve() -> list[int]:
        core.add("request", GenerateRequest(tuple(range(40, 60)), params))
        return [token.token_id for token in iter_tokens(core)]

    before = serve()
    assert lists_of(recordings) == 1
    old = [*core.executor.worker.cache.states._parts.values()]
    switcher.sleep(1)
    switcher.wake_up()
    for part in old:
        part.fill_(1.0)
    assert serve() == before
    assert all(bool(torch.all(part == 1.0)) for part in old)
    assert lists_of(recordings) == 1


@pytest.mark.slow
def test_another_number_of_threads_has_a_recording_of_its_own(
    model: Path, unrecorded: list[Sequence[int]], recordings: list[RecordedLayers]
) -> None:
    llm = engine(model)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert answers(llm) == unrecorded
        first = lists_of(recordings)
        torch.set_num_threads(2)
        assert answers(llm) == unrecorded
    finally:
        torch.set_num_threads(threads)
    assert lists_of(recordings) == 2 * first


@pytest.mark.slow
def test_calls_that_compute_something_else_are_not_used(
    not_recorded: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Replayer()
    made.call_all = lambda *_: 0  # none of the calls
    monkeypatch.setattr("trencadis.engine.devices.cpu.device.Replayer", lambda *_, **__: made)
    not_recorded("the same calls have computed another result")


@pytest.mark.slow
def test_without_the_function_that_makes_the_calls_programs_compute(
    not_recorded: Callable[[str], None],
    recordings: list[RecordedLayers],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(*_: object, **__: object) -> None:
        raise NoKernel("there is no C++ compiler")

    monkeypatch.setattr("trencadis.engine.devices.cpu.device.Replayer", missing)
    not_recorded("Decode steps are not recorded")
    assert not recordings


@pytest.mark.slow
def test_layers_of_other_operators_are_computed_by_their_programs(
    model: Path, recordings: list[RecordedLayers], log: pytest.LogCaptureFixture
) -> None:
    plain = answers(engine(model, dtype="float32", compile=False))
    assert answers(engine(model, dtype="float32")) == plain
    assert lists_of(recordings) == 0
    assert "a layer calls aten" in log.text


@pytest.mark.slow
def test_a_new_cache_after_sleep_is_the_one_that_is_read(
    model: Path, recordings: list[RecordedLayers]
) -> None:
    core = EngineCore(EngineConfig(model=str(model), num_blocks=60, block_size=8, **SETTINGS))
    core.warm_up()
    switcher = ModelSwitcher(core)

    def serve() -> list[int]:
        core.add(
            "request",
            GenerateRequest(tuple(range(40, 80)), SamplingParams(temperature=0.0, max_tokens=30)),
        )
        return [token.token_id for token in iter_tokens(core)]

    before = serve()
    assert lists_of(recordings) == 1
    for _ in range(2):
        cache = core.executor.worker.cache
        old = [part(i) for i in range(cache.num_layers) for part in (cache.key, cache.value)]
        switcher.sleep(1)
        switcher.wake_up()
        assert core.executor.worker.cache.key(0).data_ptr() != old[0].data_ptr()
        for part in old:
            part.fill_(1.0)
        assert serve() == before
        written = [bool(torch.any(part != 1.0)) for part in old]
        assert not any(written), "a step has written to the cache of before"
    assert lists_of(recordings) == 1


def iter_tokens(core: EngineCore) -> list[Any]:
    tokens = []
    while core.has_work:
        tokens += core.step()
    return tokens


@pytest.mark.slow
def test_weights_in_the_order_of_onednn_are_not_recorded(
    model: Path,
    recordings: list[RecordedLayers],
    monkeypatch: pytest.MonkeyPatch,
    log: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("trencadis.engine.devices.cpu.device._has_kernel", lambda layer: False)
    plain = answers(engine(model, compile=False))
    assert len(answers(engine(model))) == len(plain)
    assert lists_of(recordings) == 0
    assert "Decode steps are not recorded" in log.text


@pytest.mark.slow
def test_a_recording_that_lacks_a_call_is_not_used(
    not_recorded: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    noted, kernels = recorded_layers._noted, []

    def all_but_one(kernel: Any) -> Any:
        kernels.append(kernel)
        if len(kernels) != 2:
            return noted(kernel)
        note, wrapped = recorded_layers.note, noted(kernel)
        nothing = native_calls.address_of(ctypes.CDLL(None).getpid)

        def call(*arguments: Any) -> None:
            with monkeypatch.context() as patch:
                patch.setattr(recorded_layers, "note", lambda _, *given: note(nothing, *given))
                wrapped(*arguments)

        return call

    monkeypatch.setattr(recorded_layers, "_noted", all_but_one)
    not_recorded("the same calls have computed another result")


@pytest.mark.slow
def test_a_step_that_computes_nan_is_recorded_later(
    model: Path, recordings: list[RecordedLayers], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engine(model)
    nan, step = torch.full((1, 1, 48), torch.nan, dtype=torch.bfloat16), RecordedLayers._record

    def with_nan(self: RecordedLayers, key: Any, given: Any, args: Any, kwargs: Any) -> Any:
        return step(self, key, (nan, *given[1:]), (nan, *args[1:]), kwargs)

    prompts = [[1, 2, 3]]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with monkeypatch.context() as patch:
        patch.setattr(RecordedLayers, "_record", with_nan)
        with pytest.raises(RequestFailed, match="NaN"):
            llm.generate(prompts, params)
    assert lists_of(recordings) == 0
    llm.generate(prompts, params)
    assert lists_of(recordings) == 1
