"""Changes of single logits: bias, tokens that must not end an answer, penalties.

They are computed on the host for the few tokens that they concern and carried out where the logits
are. A table of token counts on the device would take ``max_num_seqs * vocabulary`` numbers (160 MB
for 256 sequences of 128k tokens) and would have to follow forks, swaps and preemptions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch

from trencadis.engine.runner.step import IntArray, RowRequest

FloatArray = npt.NDArray[np.float32]


@attrs.frozen(eq=False)
class LogitEdits:
    """Each logit at ``(rows, tokens)``, which occurs once, becomes ``penalised - lower``.

    ``penalised`` is ``raised = logit + bias`` divided by ``penalty`` where it is positive and
    multiplied by it otherwise (CTRL, Keskar et al., 2019).
    """

    rows: IntArray
    tokens: IntArray
    bias: FloatArray
    penalty: FloatArray
    lower: FloatArray

    def __len__(self) -> int:
        return len(self.rows)

    def packed(self, chunk: int) -> list[FloatArray]:
        """The edits as arrays fp32 ``[5, chunk]`` for `apply_edits`. It holds ids up to 2**24.

        The last one is filled up with copies of its first edit, which change nothing further.
        """
        if not len(self):
            return []
        columns = (self.rows, self.tokens, self.bias, self.penalty, self.lower)
        packed = np.stack(columns, dtype=np.float32, casting="unsafe")
        pieces = [packed[:, start : start + chunk] for start in range(0, len(self), chunk)]
        return [np.pad(piece, ((0, 0), (0, chunk - piece.shape[1])), "wrap") for piece in pieces]


def find_edits(rows: Sequence[RowRequest | None]) -> LogitEdits:
    """The edits that the parameters of ``rows`` ask for. None: a row that is not sampled.

    Only of rows with `SampleSettings.changes_logits`.
    """
    asking = ((i, row) for i, row in enumerate(rows) if row and row.samples[0].changes_logits)
    found = [(i, edits) for i, row in asking if (edits := _edits_of(row))]
    if not found:
        empty = np.empty(0, np.float32)
        return LogitEdits(empty.astype(np.int32), empty.astype(np.int32), empty, empty, empty)
    numbers = np.concatenate([np.full(len(edits[0]), i, np.int32) for i, edits in found])
    columns = (np.concatenate(parts) for parts in zip(*(edits for _, edits in found), strict=True))
    return LogitEdits(numbers, *columns)


def apply_edits(logits: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """``logits`` fp32 ``[rows, vocabulary]`` with the edits of `LogitEdits.packed`, as a copy."""
    rows, tokens, bias, penalty, lower = packed.unbind()
    flat, at = logits.reshape(-1), rows.long() * logits.shape[-1] + tokens.long()
    raised = flat.index_select(0, at) + bias
    penalised = torch.where(raised > 0, raised / penalty, raised * penalty)
    return flat.index_copy(0, at, penalised - lower).view_as(logits)


def _edits_of(row: RowRequest) -> tuple[IntArray, FloatArray, FloatArray, FloatArray] | None:
    """Token ids, bias, penalty and lowering of one row; None without any."""
    params, history = row.samples[0].params, row.samples[0].history
    forbidden = row.bad_next_ids
    if row.mask is None:
        forbidden |= row.forbidden_token_ids
    repeats = params.repetition_penalty != 1.0
    counts = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    counts = counts and row.num_output_tokens > 0
    if not (params.logit_bias or forbidden or repeats or counts):
        return None
    seen = set(history[: row.num_tokens]) if repeats else set()
    output = history[row.samples[0].num_prompt_tokens : row.num_tokens] if counts else ()
    generated, times = np.unique(np.asarray(output, np.int32), return_counts=True)
    tokens = np.array(
        sorted({*params.logit_bias, *forbidden, *seen, *generated.tolist()}), np.int32
    )
    bias, penalty, lower = np.zeros((3, len(tokens)), np.float32)
    penalty[:] = 1.0
    bias[_at(tokens, params.logit_bias)] = list(params.logit_bias.values())
    bias[_at(tokens, forbidden)] = -math.inf
    penalty[_at(tokens, seen)] = params.repetition_penalty
    amount = params.presence_penalty + params.frequency_penalty * times
    lower[np.searchsorted(tokens, generated)] = amount
    return tokens, bias, penalty, lower


def _at(tokens: IntArray, ids: object) -> npt.NDArray[np.intp]:
    return np.searchsorted(tokens, np.array(list(ids), np.int32))  # type: ignore[call-overload]
