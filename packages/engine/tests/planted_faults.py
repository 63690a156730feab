"""Devices for the tests of the doctor: a Gaudi of the stand-in with faults planted below it.

They are named as ``planted_faults:Class``, and plant their faults when they are made.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trencadis.engine.devices import HPUDevice, PendingCopy
from trencadis.engine.devices.hpu import attention as row_attention
from trencadis.engine.devices.hpu.attention import RowAttention
from trencadis.engine.runner.forward_runner import ForwardRunner


class FaultyKernels(HPUDevice):
    """FusedRMSNorm gives wrong values, the rotary kernel raises, FusedSDPA never returns."""

    def __init__(self) -> None:
        super().__init__()
        kernels = importlib.import_module("habana_frameworks.torch.hpex.kernels")
        norms = importlib.import_module("habana_frameworks.torch.hpex.normalization")
        right = norms.FusedRMSNorm.forward

        def wrong(ctx: Any, *given: Any) -> Any:
            return right(ctx, *given) * 1.5

        def raising(*given: Any) -> Any:
            raise RuntimeError("planted in /home/somebody/bridge: no such recipe")

        def hanging(*given: Any) -> Any:
            while True:
                time.sleep(1)

        norms.FusedRMSNorm.forward = staticmethod(wrong)
        kernels.apply_rotary_pos_emb = raising
        kernels.FusedSDPA.forward = staticmethod(hanging)


class DiesOnce(HPUDevice):
    """The first answer ends the process, as an assertion of a driver does; a later process serves.

    ``PLANTED_FAULT`` names a file that remembers it.
    """

    def fetch(self, tensors: Sequence[torch.Tensor]) -> PendingCopy:
        marker = Path(os.environ["PLANTED_FAULT"])
        if not marker.exists():
            marker.touch()
            os._exit(134)
        return super().fetch(tensors)


class _Unfound(dict[Any, Any]):
    """What is put in is not found again."""

    def get(self, *_: Any) -> None:
        return None


class NeverReplays(HPUDevice):
    """Graphs are captured, and programs compiled, and each step runs without them."""

    def __init__(self) -> None:
        super().__init__()
        made = ForwardRunner.__init__

        def make(runner: ForwardRunner, *given: Any, **named: Any) -> None:
            made(runner, *given, **named)
            runner._graphs, runner._programs.forward = _Unfound(), _Unfound()

        ForwardRunner.__init__ = make  # type: ignore[method-assign]


class WrongTokens(HPUDevice):
    """Attention is too strong."""

    def __init__(self) -> None:
        super().__init__()
        attend = RowAttention.attend

        def too_strong(attention: RowAttention, *given: Any) -> Any:
            return attend(attention, *given) * 3.0

        RowAttention.attend = too_strong  # type: ignore[method-assign]


class WrongSharedBlocks(HPUDevice):
    """Blocks that sequences share are scored too high; all others are right."""

    def __init__(self) -> None:
        super().__init__()
        score = row_attention._score_shared

        def too_high(rows: torch.Tensor, *given: Any) -> Any:
            return score(rows * -3.0, *given)

        row_attention._score_shared = too_high  # type: ignore[assignment]


class ForgetsRecipes(HPUDevice):
    """What was compiled in the compile-only mode is compiled again when it first runs."""

    @contextmanager
    def compile_only(self) -> Generator[None, None, None]:
        bridge = importlib.import_module("gaudi_standin").BRIDGE
        known = set(bridge._recipes)
        with super().compile_only():
            yield
        bridge._recipes &= known


class FailsInSecondProfile(HPUDevice):
    """The profiling run of the second model that is loaded raises, as without enough memory."""

    _num_loaded = 0

    def optimize(self, model: nn.Module) -> None:
        super().optimize(model)
        self._num_loaded += 1

    def peak_memory(self, run: Callable[[], object]) -> int:
        if self._num_loaded > 1:
            raise RuntimeError("planted: no memory for the profiling run")
        return super().peak_memory(run)


class ComputesInWarmUp(HPUDevice):
    """The compile-only mode starts an operation, which changes a weight."""

    def optimize(self, model: nn.Module) -> None:
        super().optimize(model)
        self._model = model

    @contextmanager
    def compile_only(self) -> Generator[None, None, None]:
        with super().compile_only():
            yield
        with torch.inference_mode():
            self._model.get_output_embeddings().weight.mul_(-1)  # type: ignore[operator]
        self.synchronize()
