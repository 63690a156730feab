"""The kernel of adapters computes what PyTorch does, each row alike in every batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trencadis.engine.devices import CPUDevice
from trencadis.engine.devices.cpu import adapter_products
from trencadis.engine.devices.cpu.adapter_products import load_adapter_kernel
from trencadis.engine.devices.cpu.native_kernel import NoKernel, load_kernel
from trencadis.engine.models.adapter_layers import sorted_slots

SLOTS = (3, 3, 3, 3, 0, 1, 2, 2, 2, 2, 2, 0, 0, 0, 0, 3, 1, 4)
RANKS = (0, 16, 1, 7, 0)


@pytest.fixture(params=["pairs of bf16", "widened"], autouse=True)
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this processor, and those that others have."""
    if request.param == "widened":

        def load(source: Path, _: object, *others: object, **settings: bool) -> object:
            return load_kernel(source, ("WIDENS",), *others, **settings)

        monkeypatch.setattr(adapter_products, "load_kernel", load)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 128), (33, 65), (7, 3), (1, 1), (576, 192)])
def test_rows_get_the_products_of_their_slots(inputs: int, outputs: int, threads: int) -> None:
    compute = load_adapter_kernel()
    draw = torch.Generator().manual_seed(inputs)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw).bfloat16()

    slots, ranks = torch.tensor(SLOTS, dtype=torch.int32), torch.tensor(RANKS, dtype=torch.int32)
    rows, before = random(len(slots), inputs), random(len(slots), outputs)
    down, up = random(4 * 16, inputs), random(4 * 16, outputs)
    used = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found, unchanged = before.clone(), before.clone()
        of_rows = sorted_slots(slots, ranks)
        compute(rows[None], found[None], found[None], of_rows, down, up, 16)
        apart = torch.full_like(before, torch.nan)
        compute(rows[None], before[None], apart[None], of_rows, down, up, 16)
        assert torch.equal(apart, found)
        assert torch.equal(before, unchanged)
        for row, slot in enumerate(SLOTS):
            held = slice((slot - 1) * 16, (slot - 1) * 16 + RANKS[slot])
            added = torch.zeros(outputs)
            if slot:
                added = (rows[row].float() @ down[held].float().t()) @ up[held].float()
            expected = before[row].float() + added
            torch.testing.assert_close(
                found[row].float(), expected, rtol=0.01, atol=0.02 * inputs**0.5
            )
            alone = before[row : row + 1].clone()
            own = sorted_slots(slots[row : row + 1], ranks)
            compute(rows[row : row + 1], alone, alone, own, down, up, 16)
            assert torch.equal(alone[0], found[row])
            if slot in (0, 4):
                assert torch.equal(found[row], before[row])
    finally:
        torch.set_num_threads(used)


def test_the_rows_of_other_slots_are_not_read() -> None:
    compute = load_adapter_kernel()
    rows = torch.randn(5, 40).bfloat16()
    down, up = (
        torch.full((32, 40), torch.nan).bfloat16(),
        torch.full((32, 24), torch.nan).bfloat16(),
    )
    down[:3], up[:3] = 0.5, 0.25
    out = torch.zeros(5, 24).bfloat16()
    slots = torch.tensor([1, 0, 1, 1, 0], dtype=torch.int32)
    ranks = torch.tensor([0, 3, 16], dtype=torch.int32)
    compute(rows, out, out, sorted_slots(slots, ranks), down, up, 16)
    assert out.isfinite().all()


def test_without_a_compiler_pytorch_computes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise NoKernel("there is no C++ compiler")

    device = CPUDevice(kernels=tmp_path)
    assert device.adapter_kernel(torch.float32) is None
    assert device.adapter_kernel(torch.bfloat16) is not None
    monkeypatch.setattr(adapter_products, "load_kernel", fails)
    assert device.adapter_kernel(torch.bfloat16) is None


def test_a_kernel_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_products, "_TOLERANCE", 0.0)
    with pytest.raises(NoKernel, match="is off by"):
        load_adapter_kernel()
