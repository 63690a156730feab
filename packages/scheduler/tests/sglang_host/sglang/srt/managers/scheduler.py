"""What is inherited of SGLang's scheduler, as far as our class relies on it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class Req:
    """A request of SGLang."""

    def __init__(self, rid: str, **fields: Any) -> None:
        self.rid = rid
        self.origin_input_ids = [1] * fields.get("num_prompt_tokens", 4)
        self.output_ids = [2] * fields.get("num_output_tokens", 0)
        self.priority: int | None = fields.get("priority")
        self.sampling_params = SimpleNamespace(max_new_tokens=fields.get("max_new_tokens", 100))
        self.time_stats = SimpleNamespace(created_time=fields.get("created_time", 0.0))
        self.beam_group: Any = fields.get("beam_group")
        self.is_finished = False

    def finished(self) -> bool:
        return self.is_finished


class Batch:
    """Requests that a step computes: ``is_extend`` where it computes prompts."""

    def __init__(self, reqs: list[Req], *, is_extend: bool = False) -> None:
        self.reqs = reqs
        self.forward_mode = SimpleNamespace(is_extend=lambda: is_extend)
        self.batch_is_full = False
        self.extend_num_tokens: int | None = None
        self.decoding_reqs: list[Req] | None = None
        self.released: list[tuple[int, int]] = []

    def release_req(self, index: int, num_left: int) -> None:
        self.released.append((index, num_left))

    def filter_batch(self, keep_indices: list[int]) -> None:
        self.reqs = [self.reqs[index] for index in keep_indices]


class Scheduler:
    """SGLang's: a step computes the prompts of new requests, or a token of each running one."""

    def __init__(self, **settings: Any) -> None:
        self.page_size = settings.get("page_size", 4)
        self.max_running_requests = settings.get("max_running_requests", 8)
        self.chunked_prefill_size: int | None = settings.get("chunked_prefill_size", 32)
        self.max_prefill_tokens = settings.get("max_prefill_tokens", 64)
        self.waiting_queue: list[Req] = []
        self.chunked_req: Req | None = None
        self.decode_offload_manager: Any = None
        self.finishing: list[Req] = []
        self.retracted: list[str] = []
        self.shut_down_with: Any = None

    def get_next_batch_to_run(self, running_batch: Batch, last_batch: Batch | None) -> Any:
        if last_batch is not None and last_batch.forward_mode.is_extend():
            running_batch.reqs = running_batch.reqs + last_batch.reqs
        batch = None if running_batch.batch_is_full else self._admit(running_batch)
        if batch is None:
            batch = self.update_running_batch(running_batch)
            for request in batch.reqs:
                request.output_ids.append(2)
        return SimpleNamespace(batch_to_run=batch if batch.reqs else None)

    def _admit(self, running_batch: Batch) -> Batch | None:
        count = self.get_num_allocatable_reqs(len(running_batch.reqs))
        count = max(0, min(count, len(self.waiting_queue)))
        if not count:
            running_batch.batch_is_full = bool(self.waiting_queue)
            return None
        admitted, self.waiting_queue = self.waiting_queue[:count], self.waiting_queue[count:]
        batch = Batch(admitted, is_extend=True)
        batch.extend_num_tokens = sum(len(each.origin_input_ids) for each in admitted)
        for request in admitted:
            request.output_ids.append(2)
        return batch

    def get_num_allocatable_reqs(self, running_bs: int) -> int:
        return self.max_running_requests - running_bs

    def update_running_batch(self, batch: Batch) -> Batch:
        return batch

    def handle_shutdown(self, recv_req: Any) -> str:
        self.shut_down_with = recv_req
        return "ended"

    def _reqs_finishing_inflight(self, batch: Batch) -> list[Req]:
        return self.finishing

    def _add_request_to_queue(self, request: Req, is_retracted: bool = False) -> None:
        assert is_retracted
        self.retracted.append(request.rid)
        self.waiting_queue.append(request)
