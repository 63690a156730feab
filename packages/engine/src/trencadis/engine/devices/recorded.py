"""A captured graph with its own input buffers, for HPU graphs and CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from trencadis.engine.devices.device import Graph
from trencadis.engine.errors import GraphError


def own_buffers(inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Copies of ``inputs``, at addresses that do not change between replays."""
    return tuple(tensor.clone() for tensor in inputs)


class RecordedGraph(Graph):
    """A captured computation that reads ``buffers`` and writes ``output``.

    ``replay`` and ``forget`` are functions of the device: run the graph, free its memory.
    """

    def __init__(
        self,
        buffers: tuple[torch.Tensor, ...],
        output: torch.Tensor | tuple[torch.Tensor, ...],
        replay: Callable[[], None],
        forget: Callable[[], None],
    ) -> None:
        self._buffers = buffers
        self._output: torch.Tensor | tuple[torch.Tensor, ...] | None = output
        self._replay = replay
        self._forget = forget

    def replay(self, inputs: Sequence[torch.Tensor], own: Sequence[torch.Tensor] = ()) -> Any:
        del own  # it has their addresses
        if self._output is None:
            raise GraphError("the graph was released: capture its shape again")
        check_inputs([(tuple(t.shape), t.dtype) for t in self._buffers], inputs)
        for buffer, given in zip(self._buffers, inputs, strict=True):
            buffer.copy_(given)
        self._replay()
        return new_aliases(self._output)

    def release(self) -> None:
        if self._output is not None:
            self._output = None
            self._buffers = ()
            self._forget()


def new_aliases(output: torch.Tensor | tuple[torch.Tensor, ...]) -> Any:
    """The result of a graph under a new alias for each replay.

    So a device can check the use of an outdated result.
    """
    if isinstance(output, torch.Tensor):
        return output.detach()
    return tuple(tensor.detach() for tensor in output)


def check_inputs(
    recorded: Sequence[tuple[tuple[int, ...], torch.dtype]], inputs: Sequence[torch.Tensor]
) -> None:
    """Check shapes and dtypes, because a copy would broadcast or convert silently.

    Raises `GraphError`, which names both.
    """
    given = [(tuple(t.shape), t.dtype) for t in inputs]
    if given != list(recorded):
        raise GraphError(
            f"the graph was recorded for inputs {_describe(recorded)} and is replayed with "
            f"{_describe(given)}: pad them to its bucket, or capture this shape"
        )


def _describe(tensors: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')}{list(s)}" for s, dtype in tensors)
