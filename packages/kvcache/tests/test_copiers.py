from __future__ import annotations

import mmap
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from trencadis.kvcache import BlockCopy, copiers
from trencadis.kvcache.copiers import StagedCopier, zeros

CPU = torch.device("cpu")
SMAPS = Path("/proc/self/smaps")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize("rows", [0, 1, 2000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_tensors_of_any_size_are_zero_and_writable(rows: int, dtype: torch.dtype) -> None:
    memory = zeros((2, rows, 1024), dtype, CPU)
    assert (memory.shape, memory.dtype, memory.is_contiguous()) == ((2, rows, 1024), dtype, True)
    assert not memory.view(torch.uint8).any()
    memory.view(torch.uint8).fill_(1)
    assert memory.view(torch.uint8).all()


def test_without_huge_pages_the_tensor_is_in_small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999, raising=False)  # the kernel rejects it
    assert not zeros((1 << 22,), torch.uint8, CPU).any()
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert not zeros((1 << 22,), torch.uint8, CPU).any()


@pytest.mark.skipif(
    not (SMAPS.exists() and HUGE_PAGES.exists()), reason="the kernel does not tell of huge pages"
)
def test_a_large_tensor_is_advised_to_use_huge_pages() -> None:
    memory = zeros((1 << 26,), torch.uint8, CPU)
    assert "hg" in _flags_of(memory.data_ptr())


def _flags_of(address: int) -> list[str]:
    """The kernel's flags of the mapping that holds ``address``; ``hg`` is advice for huge pages."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        first = line.split()[0]
        if "-" in first:
            start, end = (int(bound, 16) for bound in first.split("-"))
            inside = start <= address < end
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    return []


class NoStream:
    """A swap stream for copies within the device, which waits for nothing."""

    def join(self) -> None:
        """Nothing runs."""


def test_copies_within_the_device_gather_no_more_than_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = torch.arange(240.0).reshape(6, 10, 4)
    expected = words.clone()
    expected[:, [7, 8, 9]] = words[:, [1, 2, 3]]
    gathered: list[int] = []
    select = torch.Tensor.index_select

    def noting(tensor: torch.Tensor, dim: int, ids: torch.Tensor) -> torch.Tensor:
        found = select(tensor, dim, ids)
        gathered.append(found.nbytes)
        return found

    monkeypatch.setattr(torch.Tensor, "index_select", noting)
    monkeypatch.setattr(copiers, "STAGING_BYTES", 100)  # two layers of three blocks of 16 bytes
    copies = [BlockCopy(1, 7), BlockCopy(2, 8), BlockCopy(3, 9)]
    StagedCopier(words, torch.empty(0), NoStream()).copy(copies)
    assert gathered == [96, 96, 96]
    assert words.equal(expected)
