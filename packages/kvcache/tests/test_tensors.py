from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode

from trencadis.kvcache import (
    BlockCopy,
    CopyPlan,
    Direction,
    InvalidBlock,
    InvalidSetting,
    OutOfMemory,
    copiers,
)
from trencadis.kvcache.copiers import StagedCopier, SwapStream
from trencadis.kvcache.tensors import KVCache, LayerShape, bytes_per_block

BLOCKS = 6
DEVICES = ["cpu", "staged", "rows", "over", *(["cuda"] if torch.cuda.is_available() else [])]
"""``staged`` is the copier of accelerators with CPU streams, which do nothing. ``rows`` is the
copier of accelerators with a row of each layer's tensors for each token. ``over`` is a cache in
tensors that were there before."""

aten = torch.ops.aten

LAYER = LayerShape(kv_heads=2, key_width=8, value_width=8)
MIXED = (LAYER, LayerShape(2, 12, 8), LayerShape(1, 8, 5), LAYER)
"""Layers of which some parts are alike."""


def make(device: Any = "cpu", **changes: Any) -> KVCache:
    settings: dict[str, Any] = {
        "layers": (LAYER,) * 3,
        "num_blocks": BLOCKS,
        "block_size": 4,
        "dtype": torch.float32,
        "device": "cpu" if device in ("staged", "rows", "over") else device,
        "token_rows": device == "rows",
        "num_host_blocks": BLOCKS,
    }
    cache = KVCache(**(settings | changes))
    if device == "staged":
        cache._copiers = [
            StagedCopier(own._blocks.transpose(0, 1), own.host, SwapStream(torch.cpu))
            for own in cache._copiers
        ]
    if device == "over":
        there = [cache.key(layer) for layer in range(cache.num_layers)]
        values = [cache.value(layer) for layer in range(cache.num_layers)]
        numbers = {"block_size": cache.block_size, "num_host_blocks": cache.num_host_blocks}
        return KVCache.over(there, values, **numbers)
    return cache


def fill(cache: KVCache) -> torch.Tensor:
    """Give every block its own content; returns it as ``[num_blocks, ...]`` on the host."""
    for part in parts(cache):
        part.copy_(torch.randn(part.shape))
    return contents(cache)


def contents(cache: KVCache) -> torch.Tensor:
    blocks = [part.reshape(BLOCKS, -1) for part in parts(cache)]
    return torch.cat(blocks, dim=1).cpu()


def parts(cache: KVCache) -> list[torch.Tensor]:
    layers = range(cache.num_layers)
    return [*(cache.key(layer) for layer in layers), *(cache.value(layer) for layer in layers)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_cache_is_zero_at_first_and_its_views_are_contiguous(device: str) -> None:
    cache = make(device)
    assert not contents(cache).any()
    for layer in range(cache.num_layers):
        for view in (cache.key(layer), cache.value(layer)):
            assert view.is_contiguous()
            if device == "rows":
                assert view.shape == (BLOCKS * 4, 2, 8)
                continue
            assert view.shape == (BLOCKS, 2, 4, 8)
            # What decode attention reads: the prefix, flattened over block and head, no copy.
            assert view[:3].flatten(0, 1).data_ptr() == view.data_ptr()


def test_token_rows_are_not_views() -> None:
    cache = make("rows")
    assert not any(part._is_view() for part in parts(cache))
    assert len({part.data_ptr() for part in parts(cache)}) == 2 * cache.num_layers


def test_writes_through_the_views_reach_the_cache() -> None:
    cache = make()
    cache.key(1)[2] = 5
    cache.value(2)[3] = 7
    cache.copy([BlockCopy(2, 4), BlockCopy(3, 5)])
    assert cache.key(1)[4].eq(5).all()
    assert cache.value(2)[5].eq(7).all()
    assert int(contents(cache).count_nonzero()) == 4 * 2 * 4 * 8


def test_the_bytes_of_a_block_are_those_of_seed_000() -> None:
    # Llama 3 8B in bfloat16: 131,072 bytes per token.
    llama = [LayerShape(8, 128, 128)] * 32
    assert bytes_per_block(llama, block_size=128, dtype=torch.bfloat16) == 131_072 * 128


def test_the_bytes_of_a_block_are_those_of_all_parts() -> None:
    own = sum(part.nbytes for part in parts(make(layers=MIXED)))
    assert own == BLOCKS * bytes_per_block(MIXED, block_size=4, dtype=torch.float32)


def test_keys_and_values_have_the_width_of_their_layer(device: str) -> None:
    cache = make(device, layers=MIXED)
    for number, layer in enumerate(MIXED):
        for part, width in ((cache.key, layer.key_width), (cache.value, layer.value_width)):
            assert part(number).numel() == BLOCKS * 4 * layer.kv_heads * width
            assert part(number).shape[-1] == width


@given(
    st.lists(
        st.builds(BlockCopy, st.integers(0, BLOCKS - 1), st.integers(1, BLOCKS - 1)),
        max_size=BLOCKS - 1,
        unique_by=lambda copy: copy.dst,
    ),
    st.sampled_from(DEVICES),
    st.sampled_from([(LAYER,) * 3, MIXED]),
)
def test_copies_are_carried_out_at_once_and_change_no_other_block(
    copies: list[BlockCopy], device: str, layers: tuple[LayerShape, ...]
) -> None:
    cache = make(device, layers=layers)
    before = fill(cache)
    expected = before.clone()
    for src, dst in copies:
        expected[dst] = before[src]
    cache.copy(copies)
    assert torch.equal(contents(cache), expected)


def test_blocks_can_be_exchanged_and_plans_padded_with_repeats(device: str) -> None:
    cache = make(device)
    before = fill(cache)
    cache.copy([BlockCopy(1, 4), BlockCopy(4, 1), BlockCopy(4, 1), BlockCopy(4, 1)])
    assert torch.equal(contents(cache), before[[0, 4, 2, 3, 1, 5]])


@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [(torch.bfloat16, 8), (torch.float16, 1), (torch.float8_e4m3fn, 3), (torch.float64, 8)],
)
def test_every_dtype_and_size_is_copied_bit_by_bit(
    device: str, dtype: torch.dtype, head_dim: int
) -> None:
    layers = [LayerShape(1, head_dim, head_dim)] * 3
    cache = make(device, dtype=dtype, layers=layers, block_size=1)
    bits = [part.view(torch.uint8) for part in parts(cache)]
    for part in bits:
        part.copy_(torch.randint(0, 256, part.shape, dtype=torch.uint8))
    before = torch.stack(bits, dim=1)
    cache.copy([BlockCopy(5, 2)])
    cache.swap_out([BlockCopy(3, 0)])
    cache.swap_in([BlockCopy(0, 4)])
    cache.wait()
    assert torch.equal(torch.stack(bits, dim=1), before[[0, 1, 5, 3, 3, 5]])


def test_blocks_go_to_the_host_and_come_back(device: str) -> None:
    cache = make(device)
    before = fill(cache)
    cache.swap_out([BlockCopy(2, 0), BlockCopy(3, 1), BlockCopy(5, 5)])
    cache.wait()
    for part in parts(cache):
        part.view(BLOCKS, -1)[1:] = 0
    cache.swap_in([BlockCopy(0, 4), BlockCopy(1, 3), BlockCopy(5, 1)])
    cache.wait()
    expected = torch.zeros_like(before)
    expected[0], expected[4], expected[3], expected[1] = before[0], before[2], before[3], before[5]
    assert torch.equal(contents(cache), expected)


def test_a_swapped_block_can_be_overwritten_at_once(device: str) -> None:
    cache = make(device, layers=[LayerShape(8, 64, 64)] * 16, block_size=128)
    before = fill(cache)
    for _ in range(5):
        cache.swap_out([BlockCopy(2, 0), BlockCopy(3, 1)])
        cache.copy([BlockCopy(4, 2), BlockCopy(5, 3)])
        cache.swap_in([BlockCopy(0, 2), BlockCopy(1, 3)])
    cache.wait()
    assert torch.equal(contents(cache), before)


def test_with_little_staging_memory_the_layers_are_copied_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copiers, "STAGING_BYTES", 1)
    cache = make("staged")
    before = fill(cache)
    cache.copy([BlockCopy(1, 4), BlockCopy(4, 1)])
    assert torch.equal(contents(cache), before[[0, 4, 2, 3, 1, 5]])


class LargestTensor(TorchDispatchMode):
    """Notes the most rows that an operation has made of blocks."""

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket in (aten.index_select, aten.empty, aten.stack):
            self.rows = max(self.rows, len(made))
        return made


@pytest.mark.parametrize(("kind", "blocks", "rows"), [("staged", 2, 2), ("rows", 4, 8)])
def test_with_little_staging_memory_blocks_are_swapped_in_batches_of_a_power_of_two(
    monkeypatch: pytest.MonkeyPatch, kind: str, blocks: int, rows: int
) -> None:
    """``blocks`` fit into it, in ``rows`` of 4 tokens for each layer, or as whole blocks."""
    cache = make(kind)
    per_block = 2 * 3 * LAYER.kv_heads * LAYER.key_width * 4 * 4
    monkeypatch.setattr(copiers, "STAGING_BYTES", (blocks + 1) * per_block)
    before = fill(cache)
    copies = [BlockCopy(block, 5 - block) for block in range(1, 6)]
    with LargestTensor() as out:
        cache.swap_out(copies)
    fill(cache)
    with LargestTensor() as back:
        cache.swap_in([BlockCopy(copy.dst, copy.src) for copy in copies])
    cache.wait()
    assert torch.equal(contents(cache)[1:], before[1:])
    assert (out.rows, back.rows) == (rows, {"staged": 2, "rows": 2}[kind])


class RecordedStreams:
    """A device module that records which stream waits for which."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now = self.Named(self, "main")

    class Named:
        def __init__(self, module: RecordedStreams, name: str) -> None:
            self.module, self.name = module, name

        def wait_stream(self, other: Any) -> None:
            self.module.log.append(f"{self.name} waits for {other.name}")

        def record_event(self) -> str:
            self.module.log.append(f"{self.name} marks")
            return f"mark of {self.name}"

        def wait_event(self, event: str) -> None:
            self.module.log.append(f"{self.name} waits for {event}")

    def Stream(self) -> Named:
        return self.Named(self, "side")

    def current_stream(self) -> Named:
        return self.now

    @contextmanager
    def stream(self, stream: Named) -> Iterator[None]:
        self.log.append("side begins")
        yield
        self.log.append("side ends")


@pytest.mark.parametrize("direction", [Direction.OUT, Direction.IN])
def test_swaps_wait_for_the_compute_stream_and_it_waits_for_the_swaps(
    direction: Direction,
) -> None:
    cache, streams = make("staged"), RecordedStreams()
    cache._copiers[0]._swap_stream = SwapStream(streams)  # type: ignore[union-attr]
    cache.carry_out([(direction, [BlockCopy(1, 2)])])
    assert streams.log == ["side waits for main", "side begins", "side marks", "side ends"]
    cache.copy([BlockCopy(1, 2)])
    assert streams.log[4:] == ["main waits for mark of side"]
    cache.wait()
    assert len(streams.log) == 5


def test_the_batches_of_a_plan_are_carried_out_in_order(device: str) -> None:
    cache = make(device)
    before = fill(cache)
    plan = CopyPlan()
    plan.add(Direction.OUT, [BlockCopy(1, 0)])
    plan.add(Direction.WITHIN, [BlockCopy(2, 1)])
    plan.add(Direction.WITHIN, [BlockCopy(1, 3)])
    plan.add(Direction.IN, [BlockCopy(0, 2)])
    cache.carry_out(plan)
    cache.wait()
    assert torch.equal(contents(cache), before[[0, 2, 1, 2, 4, 5]])


def test_empty_batches_change_nothing() -> None:
    cache = make()
    before = fill(cache)
    for act in (cache.copy, cache.swap_out, cache.swap_in, cache.carry_out):
        act([])
    assert torch.equal(contents(cache), before)


@pytest.mark.parametrize("copy", [BlockCopy(6, 1), BlockCopy(1, 6), BlockCopy(-1, 1)])
@pytest.mark.parametrize("direction", list(Direction))
def test_ids_outside_the_cache_are_refused_before_any_copy(
    copy: BlockCopy, direction: Direction
) -> None:
    cache = make()
    before = fill(cache)
    with pytest.raises(InvalidBlock, match=f"cannot copy block {copy.src} to {copy.dst}"):
        cache.carry_out([(direction, [BlockCopy(1, 2), copy])])
    assert torch.equal(contents(cache), before)


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        *[(name, {name: 0}) for name in ("num_blocks", "block_size")],
        *[("layers", {"layers": layers}) for layers in ((), None, (8, 8))],
        *[("kv_heads", {"layers": (LAYER, LayerShape(-1, 8, 8))})],
        *[("key_width", {"layers": (LayerShape(1, 0, 8),)})],
        *[("value_width", {"layers": (LayerShape(1, 8, "8"),)})],
    ],
)
def test_every_size_is_at_least_one(size: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting, match=size):
        make("cpu", **changes)


def test_a_layer_without_heads_takes_no_memory() -> None:
    cache = make("cpu", layers=(LayerShape(0, 0, 0), LAYER))
    assert cache.key(0).numel() == cache.value(0).numel() == 0
    assert cache.key(1).shape == make("cpu", layers=(LAYER,)).key(0).shape
    assert bytes_per_block((LayerShape(0, 0, 0),), block_size=4, dtype=torch.float32) == 0


def test_the_number_of_host_blocks_is_at_least_zero() -> None:
    assert make(num_host_blocks=0).num_host_blocks == 0
    with pytest.raises(InvalidSetting, match="num_host_blocks"):
        make(num_host_blocks=-1)


@pytest.mark.parametrize("device", ["cpu", "rows"])
@pytest.mark.parametrize("setting", ["num_blocks", "num_host_blocks"])
@pytest.mark.parametrize("number", [10**9, 10**15, 10**40])
def test_memory_that_cannot_be_allocated_is_an_error_with_a_remedy(
    device: str, setting: str, number: int
) -> None:
    large = {"layers": [LayerShape(64, 128, 128)] * 3, "block_size": 128, setting: number}
    with pytest.raises(OutOfMemory, match=f"{setting} {number} needs .* bytes .* lower {setting}"):
        make(device, **large)


@pytest.mark.parametrize("layer", [3, -1, 1.0, "1", None])
def test_a_layer_outside_the_cache_is_refused(layer: Any) -> None:
    cache = make()
    for view in (cache.key, cache.value):
        with pytest.raises(InvalidSetting, match="layer must be an integer from 0 to 2"):
            view(layer)


@pytest.mark.parametrize(
    ("argument", "value"),
    [("dtype", "float32"), ("device", "gpu"), ("device", None), ("device", 1.5)],
)
def test_a_wrong_dtype_or_device_is_named(argument: str, value: Any) -> None:
    with pytest.raises(InvalidSetting, match=argument):
        make(**{argument: value})


@pytest.mark.parametrize(
    "plan", [None, 5, [5], [("sideways", ())], [(Direction.OUT, 5)], [(Direction.OUT, [(1, "2")])]]
)
def test_a_plan_that_is_none_is_refused(plan: Any) -> None:
    with pytest.raises(InvalidSetting, match="CopyPlan"):
        make().carry_out(plan)


def test_a_plan_with_a_bad_batch_is_not_begun() -> None:
    cache = make()
    before = fill(cache)
    with pytest.raises(InvalidBlock):
        cache.carry_out([(Direction.WITHIN, [(1, 2)]), (Direction.OUT, [(1, 99)])])
    assert torch.equal(contents(cache), before)


# Over tensors that a runtime has.


def test_a_cache_over_tensors_has_no_copy_of_them() -> None:
    # As vLLM's: [2, num_blocks, block_size, kv_heads, width] for each layer; of MLA one tensor.
    stacked = [torch.randn(2, BLOCKS, 4, 2, 8) for _ in range(3)]
    before = [layer.clone() for layer in stacked]
    keys, values = zip(*(layer.unbind() for layer in stacked), strict=True)
    cache = KVCache.over(keys, values, block_size=4)
    assert (cache.num_layers, cache.num_blocks, cache.num_host_blocks) == (3, BLOCKS, 0)
    assert cache.key(1) is keys[1]
    assert cache.value(1) is values[1]
    cache.copy([BlockCopy(1, 4), BlockCopy(4, 1)])
    for layer, old in zip(stacked, before, strict=True):
        assert torch.equal(layer, old[:, [0, 4, 2, 3, 1, 5]])
    joint = KVCache.over([stacked[0][0]], block_size=4)
    with pytest.raises(InvalidSetting, match="has no separate values"):
        joint.value(0)
    with pytest.raises(InvalidBlock):
        joint.copy([BlockCopy(1, BLOCKS)])


def test_a_cache_over_tensors_of_several_widths_and_types_copies_each_once() -> None:
    layers = [torch.randn(BLOCKS, 3), torch.randn(BLOCKS, 2, 8).bfloat16(), torch.randn(BLOCKS, 3)]
    before = [layer.clone() for layer in layers]
    cache = KVCache.over(layers, block_size=1, num_host_blocks=1)
    cache.copy([BlockCopy(1, 4), BlockCopy(4, 1)])
    cache.swap_out([BlockCopy(2, 0)])
    cache.swap_in([BlockCopy(0, 5)])
    cache.wait()
    for layer, old in zip(layers, before, strict=True):
        assert torch.equal(layer, old[[0, 4, 2, 3, 1, 2]])


@pytest.mark.parametrize(
    ("keys", "values", "message"),
    [
        ([], (), "there are 0 keys and 0 values"),
        ([torch.zeros(4, 2)] * 2, [torch.zeros(4, 2)], "there are 2 keys and 1 values"),
        ([torch.zeros(4, 2).T], (), "give a contiguous tensor"),
        ([torch.zeros(4)], (), "give a contiguous tensor"),
        ([torch.zeros(4, 2), torch.zeros(5, 2)], (), "a tensor of 5 blocks on cpu is beside one"),
        ([[1.0]], (), r"keys\[0\] must be of type Tensor"),
        (torch.zeros(4, 2), (), "keys must be of type list or tuple"),
    ],
)
def test_tensors_that_are_no_cache_are_refused(keys: Any, values: Any, message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        KVCache.over(keys, values, block_size=4)
