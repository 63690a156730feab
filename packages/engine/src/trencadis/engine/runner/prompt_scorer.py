"""Log-probabilities of prompt tokens, from the hidden states of a prefill batch.

The logits of all tokens of a batch would be gigabytes, so `ROWS` hidden states at a time are
gathered, and only what a request may ask for leaves the device. There are two programs: the gather,
one for each number of tokens of a forward pass, and the head, one for all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from trencadis.engine.api.sampling_params import MAX_LOGPROBS
from trencadis.engine.devices import Device
from trencadis.engine.models.logit_head import LogitHead
from trencadis.engine.runner.step import ChunkScores, PromptTargets

ROWS = 64
"""Hidden states whose logits are computed at once: 39 MB of fp32 for 152,064 tokens, several times
in the head's program."""

SCORED_TOKEN_COST = 1.5
"""What a scored token of a prompt takes of a step's token budget where prompts are not padded:
scoring took half as long as the forward pass of a model with 135M parameters, less of larger ones,
and slightly shorter chunks cost these nothing."""

Program = Callable[..., Any]


@attrs.frozen(eq=False)
class PendingPrompts:
    """The prompt tokens of a batch that are being scored, by sequence id.

    ``outputs``: tensors of the device, whose rows are those of the targets, one after another;
    padding is at the end alone.
    """

    targets: Mapping[int, PromptTargets]
    outputs: Sequence[torch.Tensor]

    def read(self, copies: Sequence[torch.Tensor]) -> dict[int, ChunkScores]:
        """The results, from copies of the outputs on the host."""
        rows: npt.NDArray[np.float32] = np.concatenate([copy.numpy() for copy in copies])
        results, end, width = {}, 0, (rows.shape[1] - 2) // 2
        for seq_id, targets in self.targets.items():
            start, end = end, end + len(targets.token_ids)
            count = min(targets.num_logprobs, width)
            kept = [*range(2 + count), *range(2 + width, 2 + width + count)]
            results[seq_id] = ChunkScores(targets.position, rows[start:end, kept])
        return results


class PromptScorer:
    """Scores prompt tokens with the ``head`` of a model.

    ``programs``: where compiled programs are kept, which hold no tensors. ``compiled``: let the
    device compile each program.
    """

    def __init__(
        self,
        head: LogitHead,
        device: Device,
        programs: dict[Hashable, Program] | None = None,
        *,
        compiled: bool = False,
    ) -> None:
        self._head = head
        self._device = device
        self._programs = {} if programs is None else programs
        self._compiled = compiled

    @torch.inference_mode()
    def launch(
        self,
        hidden: torch.Tensor,
        first_rows: Mapping[int, int],
        targets: Mapping[int, PromptTargets],
    ) -> PendingPrompts:
        """Start scoring ``targets``, by sequence id.

        ``hidden`` is ``[tokens, hidden size]``; ``first_rows`` has the row of each sequence's first
        token in it.
        """
        rows: list[int] = []
        token_ids: list[int] = []
        for seq_id, wanted in targets.items():
            first = first_rows[seq_id] + wanted.offset
            rows.extend(range(first, first + len(wanted.token_ids)))
            token_ids.extend(wanted.token_ids)
        packed = np.array((rows, token_ids), np.int32)
        best = MAX_LOGPROBS
        if self._device.dynamic_shapes:  # finding the 20 best takes a fifth of the scoring
            best = max(wanted.num_logprobs for wanted in targets.values())
        outputs = []
        for start in range(0, len(rows), ROWS):
            given = packed[:, start : start + ROWS]
            count = given.shape[1]
            if not self._device.dynamic_shapes:
                given = np.pad(given, ((0, 0), (0, ROWS - count)))
            outputs.append(self._score(hidden, np.ascontiguousarray(given), best))
        return PendingPrompts(targets, outputs)

    @torch.inference_mode()
    def warm_up(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run the programs for a forward pass with ``hidden``, ``[tokens, hidden size]``."""
        return self._score(hidden, np.zeros((2, ROWS), np.int32))

    def _score(
        self, hidden: torch.Tensor, given: npt.NDArray[np.int32], best: int = MAX_LOGPROBS
    ) -> torch.Tensor:
        packed = self._device.upload(torch.from_numpy(given))
        gathered = self._run("gather", _gather, hidden, packed)
        weights: dict[str, torch.Tensor] = {}
        if self._compiled:  # a program is given the weights, so that it outlives them
            weights |= {**dict(self._head.named_parameters()), **dict(self._head.named_buffers())}
        score = functools.partial(_score, self._head, best, tuple(weights))
        scored: torch.Tensor = self._run(
            f"score {best}", score, gathered, packed, *weights.values()
        )
        return scored

    def _run(self, name: str, program: Program, *inputs: torch.Tensor) -> Any:
        """The result of ``program``, which ``name`` and the shapes of ``inputs`` determine."""
        if self._compiled:
            key = (f"prompt {name}", tuple(tensor.shape for tensor in inputs))
            if key not in self._programs:
                traced = make_fx(program, tracing_mode="fake")(*inputs)
                self._programs[key] = self._device.compile(traced, inputs)
            program = self._programs[key]
        result = program(*inputs)
        self._device.mark_step()
        return result


def _gather(hidden: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    return hidden.index_select(0, packed[0].long())


def _score(
    head: LogitHead,
    best: int,
    names: Sequence[str],
    hidden: torch.Tensor,
    packed: torch.Tensor,
    *weights: torch.Tensor,
) -> torch.Tensor:
    """fp32 ``[rows, 2 + 2n]``: log-probability and rank of the target, then the ``best`` best
    and their ids. fp32 holds ranks and ids up to 2**24."""
    named = dict(zip(names, weights, strict=True))
    logits = torch.func.functional_call(head, named, (hidden,)) if named else head(hidden)
    logprobs = torch.log_softmax(logits, dim=-1)
    own = logprobs.gather(1, packed[1].long().unsqueeze(1))
    rank = 1.0 + (logprobs > own).float().sum(-1, keepdim=True)
    values, ids = logprobs.topk(min(best, logprobs.shape[-1]), dim=-1)
    return torch.cat((own, rank, values, ids.float()), dim=1)
