"""Weights are copied to one area, in huge pages where the kernel has them."""

from __future__ import annotations

import gc
import mmap
import weakref
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from trencadis.engine.devices import CPUDevice
from trencadis.engine.devices.cpu import device as cpu_device
from trencadis.engine.devices.cpu.huge_pages import move_to_huge_pages
from trencadis.engine.devices.cpu.native_kernel import NoKernel
from trencadis.engine.devices.cpu.onednn_linear import OneDNNLinear, onednn_packs_bf16

pytestmark = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="not on Linux")


class Held(nn.Module):
    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def model_of(megabytes: int) -> nn.Module:
    """Parts of half a megabyte, of several types, and a tensor that two modules share."""
    shared = torch.randn(1 << 17)
    parts = [Held(a=torch.randn(1 << 16), b=torch.ones(2, 1 << 18, dtype=torch.int8))]
    parts += [Held(a=torch.randn(512, 512).bfloat16()) for _ in range(2 * megabytes)]
    return nn.ModuleList([*parts, Held(a=shared), Held(a=shared, small=torch.arange(9))])


def test_every_buffer_keeps_its_value_and_a_shared_one_stays_one() -> None:
    model = model_of(4)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    old = [weakref.ref(buffer) for buffer in model.buffers() if buffer.nbytes > 100]
    move_to_huge_pages(model)
    after = dict(model.named_buffers())
    assert after.keys() == before.keys()
    for name, buffer in after.items():
        assert buffer.dtype is before[name].dtype
        assert torch.equal(buffer, before[name])
    assert model[-1].a is model[-2].a
    assert not any(tensor() is not None for tensor in old)
    places = sorted((x.data_ptr(), x.nbytes) for x in after.values() if x.nbytes > 100)
    assert all(place % 64 == 0 for place, _ in places)
    ends = [place + size for place, size in places]
    assert all(end <= place for end, (place, _) in zip(ends, places[1:], strict=False))
    assert places[-1][0] - places[0][0] < sum(size for _, size in places)


@pytest.mark.skipif(not onednn_packs_bf16(), reason="oneDNN packs no bf16 here")
def test_a_model_whose_weights_onednn_has_packed_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a processor with products of tiles (AMX), or without a compiler."""

    def no_kernel(*_: object, **__: object) -> None:
        raise NoKernel("none here")

    monkeypatch.setattr(cpu_device, "load_linear_kernel", no_kernel)
    monkeypatch.setattr(CPUDevice, "_attention_of", lambda self, model: None)
    model = nn.Sequential(*(nn.Linear(1024, 1024, dtype=torch.bfloat16) for _ in range(3)))
    rows = torch.randn(4, 1024).bfloat16()
    CPUDevice().optimize(model)
    assert all(isinstance(layer, OneDNNLinear) for layer in model)
    assert all(layer.packed.is_mkldnn for layer in model)
    assert model(rows).isfinite().all()


def test_the_area_is_in_huge_pages_and_is_freed_with_its_tensors() -> None:
    if "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        pytest.skip("this kernel has no huge pages")

    def huge_bytes() -> int:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if "AnonHugePages" in line)

    gc.collect()
    before, resident = huge_bytes(), psutil.Process().memory_info().rss
    model = model_of(64)
    move_to_huge_pages(model)
    assert huge_bytes() - before > 48 << 20
    assert psutil.Process().memory_info().rss - resident < 80 << 20, "each tensor is there once"
    kept = model[3].a
    expected = kept.clone()
    del model
    gc.collect()
    assert torch.equal(kept, expected), "one tensor keeps the area"
    del kept
    gc.collect()
    assert psutil.Process().memory_info().rss - resident < 16 << 20


@pytest.mark.parametrize("fails", ["mmap", "madvise"])
def test_without_huge_pages_buffers_stay_where_they_are(
    monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    class NoArea:
        def __init__(self, *_: object, **__: object) -> None:
            if fails == "mmap":
                raise OSError("no memory")

        def madvise(self, _: int) -> None:
            raise OSError("no huge pages")

    model = model_of(4)
    before = [buffer.data_ptr() for buffer in model.buffers()]
    monkeypatch.setattr(mmap, "mmap", NoArea)
    move_to_huge_pages(model)
    assert [buffer.data_ptr() for buffer in model.buffers()] == before


def test_a_model_of_less_than_a_page_stays_where_it_is() -> None:
    model = nn.ModuleList([Held(a=torch.randn(1 << 17))])
    before = model[0].a
    move_to_huge_pages(model)
    assert model[0].a is before
