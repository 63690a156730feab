"""Refuses requests that the scheduler could never serve to their end, or not now."""

from __future__ import annotations

from trencadis.kvcache import BlockManager, ceil_div
from trencadis.scheduler.config import SchedulerConfig
from trencadis.scheduler.errors import DuplicateRequest, QueueFull, UnservableRequest
from trencadis.scheduler.group_states import GroupStates
from trencadis.scheduler.request import Request


class RequestCheck:
    """Compares requests with the settings, the KV cache and the requests in the scheduler."""

    def __init__(self, config: SchedulerConfig, blocks: BlockManager, states: GroupStates) -> None:
        self._config = config
        self._blocks = blocks
        self._states = states

    def check(self, request: Request) -> None:
        """Raises `DuplicateRequest`, `QueueFull` or `UnservableRequest`."""
        if request.request_id in self._states.groups:
            raise DuplicateRequest(f"request id {request.request_id!r} is already in the scheduler")
        num_waiting = len(self._states.waiting)
        if num_waiting >= self._config.max_waiting:
            raise QueueFull(
                f"the waiting queue has {num_waiting} requests and max_waiting is "
                f"{self._config.max_waiting}: try again later"
            )
        self._check_size(request)

    def _check_size(self, request: Request) -> None:
        length, config = request.num_prompt_tokens, self._config
        if length == 0:
            raise UnservableRequest("the prompt is empty: give at least one token")
        if length >= config.max_model_len:
            raise UnservableRequest(
                f"the prompt has {length} tokens, max_model_len is {config.max_model_len} "
                "and the output needs at least one: shorten the prompt or raise max_model_len"
            )
        if request.num_seqs > config.max_num_seqs:
            raise UnservableRequest(
                f"the request runs {request.num_seqs} sequences at once, max_num_seqs is "
                f"{config.max_num_seqs}: lower n, best_of or the beam width"
            )
        num_needed, num_total = self._max_num_blocks(request), self._blocks.pool.num_usable_blocks
        if num_needed > num_total:
            raise UnservableRequest(
                f"{length} prompt tokens and {request.num_seqs} × {request.max_tokens} more could "
                f"need {num_needed} blocks, which do not fit in the KV cache of {num_total}: "
                "shorten the prompt, lower max_tokens, n or the beam width, or add blocks"
            )

    def _max_num_blocks(self, request: Request) -> int:
        """The most blocks that a request can need when it runs alone.

        Its sequences share the full blocks of the prompt; every other block belongs to one of
        them. The last token of an output needs no slot. For a copy-on-write, the block manager
        counts one block per sequence that shares the block: one more than it copies.
        """
        block_size = self._blocks.config.block_size
        length = request.num_prompt_tokens
        num_slots = max(length, min(length + request.max_tokens, self._config.max_model_len) - 1)
        num_shared = length // block_size
        num_own = ceil_div(num_slots, block_size) - num_shared
        return num_shared + request.num_seqs * num_own + (request.num_seqs > 1)
