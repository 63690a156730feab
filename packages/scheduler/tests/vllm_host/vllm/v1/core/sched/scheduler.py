"""What is inherited of vLLM's scheduler, as far as our classes rely on it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs


@attrs.define(eq=False)
class Request:
    """A request of vLLM."""

    request_id: str
    num_prompt_tokens: int = 4
    max_tokens: int = 100
    priority: int = 0
    arrival_time: float = 0.0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0

    @property
    def is_prefill_chunk(self) -> bool:
        return self.num_computed_tokens < self.num_prompt_tokens


class Blocks:
    """The manager of the KV cache: blocks of four tokens, in two groups."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def get_block_ids(self, request_id: str) -> tuple[list[int], list[int]]:
        (request,) = (each for each in self._scheduler.running if each.request_id == request_id)
        num_tokens = request.num_computed_tokens + request.num_output_tokens
        return list(range(-(-num_tokens // 4))), [1]


class Scheduler:
    """vLLM's: it admits in order while there are tokens, up to its limit of requests."""

    def __init__(self, *, settings: Any = None, names: tuple[str, ...] = (), **config: Any) -> None:
        values = {"async_scheduling": False, "enable_chunked_prefill": True, **config}
        known = {name: value for name, value in values.items() if value is not None}
        self.scheduler_config = SimpleNamespace(**known)
        self.vllm_config = SimpleNamespace(additional_config=settings)
        self.num_spec_tokens = values.get("num_spec_tokens", 0)
        self.max_num_scheduled_tokens = values.get("max_num_scheduled_tokens", 32)
        self.max_num_running_reqs = 8
        for name in names:
            setattr(self, name, 8)
        self.kv_cache_manager = Blocks(self)
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.preempted: list[tuple[str, dict[str, Any]]] = []
        self.is_shut_down = False

    def schedule(self) -> SimpleNamespace:
        left, scheduled = self.max_num_scheduled_tokens, {}
        for request in self.running:
            wanted = 1 + self.num_spec_tokens
            if request.is_prefill_chunk:
                wanted = request.num_prompt_tokens - request.num_computed_tokens
            left -= self._run(request, min(wanted, left), scheduled)
        while self.waiting and left and len(self.running) < self.max_num_running_reqs:
            request = self.waiting.pop(0)
            self.running.append(request)
            left -= self._run(request, min(request.num_prompt_tokens, left), scheduled)
        return SimpleNamespace(num_scheduled_tokens=scheduled)

    def _run(self, request: Request, num_tokens: int, scheduled: dict[str, int]) -> int:
        if num_tokens:
            scheduled[request.request_id] = num_tokens
        if request.is_prefill_chunk:
            request.num_computed_tokens += num_tokens
        if not request.is_prefill_chunk:
            request.num_output_tokens += 1
        return num_tokens

    def has_requests(self) -> bool:
        return bool(self.running or self.waiting)

    def shutdown(self) -> None:
        self.is_shut_down = True

    def _preempt_request(self, request: Request, timestamp: float, **options: Any) -> None:
        assert request not in self.running
        request.num_computed_tokens = 0
        self.preempted.append((request.request_id, options))
        self.waiting.insert(0, request)
