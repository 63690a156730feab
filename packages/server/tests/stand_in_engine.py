"""A stand-in for an engine: it answers with the bytes of the prompt."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np

from trencadis.engine import (
    AdapterError,
    AdapterInfo,
    BatchControl,
    BatchControlResult,
    CompletionDelta,
    EngineDead,
    EngineOverloaded,
    EngineRequest,
    EngineStats,
    InvalidRequest,
    PairPrompt,
    PositionLogprobs,
    PromptLogprobs,
    RequestStatus,
    SamplingParams,
    Scoring,
    SlowConversation,
    TextPrompts,
    ThermalStats,
    TierStats,
    TokenLogprob,
)

BOS = 256


class ByteTokenizer:
    """One token per byte, and a beginning-of-sequence token."""

    vocab_size = 257
    chat_template: str | None = None

    def __init__(self) -> None:
        self.rendered: list[tuple[list[dict[str, Any]], Any]] = []
        """Messages and tools of each conversation."""
        self.is_slow = False
        """Whether pairs take longer to render than a quick attempt may."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        bos = b"" if skip_special_tokens else b"<bos>"
        spelled = (bos if token == BOS else bytes([token]) for token in token_ids)
        return b"".join(spelled).decode(errors="replace")

    def min_num_tokens(self, length: int) -> int:
        return length // 8

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id])

    def token_piece(self, token_id: int) -> str:
        return "<bos>" if token_id == BOS else f"<{token_id}>"

    def token_bytes(self, token_id: int, skip_special_tokens: bool = False) -> bytes:
        if token_id == BOS:
            return b"" if skip_special_tokens else b"<bos>"
        return bytes([token_id])

    def render_pair(
        self,
        prompt: PairPrompt,
        query: str,
        document: str,
        *,
        instruction: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        add_special_tokens: bool = True,
        quick: bool | None = None,
    ) -> list[int]:
        if quick and self.is_slow:
            raise SlowConversation("rendering takes more than 0.1 s")
        if "REJECT" in document:
            raise InvalidRequest("the template rejects these messages", "messages")
        if instruction == "REJECT":
            raise InvalidRequest("there is no place for it", "instruction")
        named = "".join(f"<{k}={v}>" for k, v in (chat_template_kwargs or {}).items())
        text = f"{named}{instruction or ''}{query}?{document}!"
        return self.encode(text, add_special_tokens)

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: object = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        quick: bool | None = None,
    ) -> list[int]:
        self.rendered.append((messages, tools))
        if any("REJECT" in str(message["content"]) for message in messages):
            raise InvalidRequest("the template rejects these messages", "messages")
        text = "".join(f"[{message['role']}]{message['content']}" for message in messages)
        text += "".join(f"<{k}={v}>" for k, v in (chat_template_kwargs or {}).items())
        return self.encode(text + "[assistant]" * add_generation_prompt)


class StandInEngine:
    """Answers with the bytes of the prompt. Tests set its attributes."""

    def __init__(self) -> None:
        self.tokenizer = ByteTokenizer()
        self.max_model_len = 256
        self.model_name = "stand-in"
        self.delay = 0.0
        self.overloaded = False
        self.dies_after: int | None = None
        self.fails_with: Exception | None = None
        self.aborts = False
        self.stop_reason: str | int | None = None
        self.script: Sequence[str] = ()
        """The texts of an answer's tokens, in place of the prompt's bytes."""
        self.script_tokens: Sequence[int] = ()
        """The tokens with these texts; by default all are the same."""
        self.is_alive = True
        self.hangs = False
        self.running: set[str] = set()
        self.requests: list[tuple[list[int], SamplingParams, str | None, int]] = []
        self.salts: list[str | None] = []
        self.clients: list[str] = []
        self.loras: list[str | None] = []
        self.adapters: tuple[AdapterInfo, ...] = ()
        self.aborted: list[str] = []
        self.orders: list[BatchControl] = []
        self.thermal: ThermalStats | None = None
        self.request_status: RequestStatus = "normal"
        self.away_s, self.num_preemptions = 0.0, 0
        self.queue_s: float | None = None
        self.failed = asyncio.Event()
        self.health: Exception | None = None
        self.activity: str | None = None
        self.embedding_size = 0
        """Above 0: it computes embeddings, from how often each letter occurs."""
        self.text_prompts = TextPrompts()
        self.scoring: Scoring | None = None
        """Where it is set, it scores: the logit is the number of letters a in a prompt."""

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            num_running_reqs=len(self.running),
            num_running_seqs=8,
            max_running_seqs=32,
            max_num_seqs=32,
            max_prefill_tokens=512,
            max_num_batched_tokens=1024,
            num_waiting_reqs=2,
            num_compiling_reqs=1,
            num_swapped_reqs=6,
            num_preempted_reqs=9,
            num_used_blocks=5,
            num_total_blocks=20,
            highest_block_in_use=7,
            block_size=16,
            max_model_len=256,
            num_queued_swaps=23,
            num_buckets=31,
            num_ready_buckets=30,
            is_warming_up=True,
            num_graphs=25,
            max_adapters=4,
            running_adapters=("a", "b"),
            waiting_adapters=("c",),
            disk_tier=TierStats(
                num_bytes=61,
                num_stored_blocks=62,
                num_stored_bytes=63,
                num_loaded_blocks=64,
                num_loaded_bytes=65,
                num_errors=66,
            ),
            core_silence_s=0.75,
            core_silence_limit_s=60.0,
            num_preemptions=3,
            num_swaps=1,
            num_recomputes=2,
            num_steps=41,
            num_swap_out_bytes=4096,
            num_swap_in_bytes=2048,
            swap_seconds=0.5,
            num_prompt_tokens=11,
            num_prefix_query_tokens=10,
            num_prefix_hit_tokens=8,
            num_defragmented_blocks=14,
            num_prefill_tokens=12,
            num_generation_tokens=13,
            num_steps_by_tokens=(3, 2, *(0,) * 11, 1),
            num_padded_tokens=17,
            num_bucket_misses=19,
            num_cold_forwards=21,
            num_compilations=22,
            num_core_restarts=4,
            thermal=self.thermal,
        )

    async def check_health(self) -> str | None:
        if self.hangs:
            await asyncio.sleep(3600)
        if self.health is not None:
            raise self.health
        if not self.is_alive:
            raise EngineDead("the core ended with exit code 9: restart the server")
        return self.activity

    async def wait_until_failed(self) -> str:
        await self.failed.wait()
        return "the core ended with exit code 9"

    async def generate(self, request: EngineRequest) -> AsyncGenerator[CompletionDelta, None]:
        await self.check_health()
        if self.overloaded:
            raise EngineOverloaded("2048 requests are waiting: try again later")
        if self.fails_with is not None:
            raise self.fails_with
        prompt, params = list(request.prompt_token_ids), request.params
        key = request.request_id or f"request-{len(self.requests)}"
        self.requests.append((prompt, params, request.request_id, request.priority))
        self.salts.append(request.cache_salt)
        self.clients.append(request.client)
        self.loras.append(request.lora)
        self.running.add(key)
        finished = False
        try:
            async for delta in self._answers(key, prompt, params):
                yield delta
            finished = True
        finally:
            self.running.discard(key)
            if not finished:
                self.aborted.append(key)

    async def load_adapter(self, name: str, path: str, within: Sequence[str] = ()) -> None:
        await self.check_health()
        self.allowed = within
        if any(adapter.name == name for adapter in self.adapters):
            raise AdapterError(f"the adapter {name!r} has already been loaded", "lora_name")
        if not os.path.exists(f"{path}/adapter_config.json"):  # noqa: PTH110, ASYNC240
            raise AdapterError(f"{path}/adapter_config.json cannot be read")
        self.adapters += (AdapterInfo(name, path, rank=4, num_bytes=100),)

    async def unload_adapter(self, name: str) -> None:
        await self.check_health()
        self.adapters = tuple(each for each in self.adapters if each.name != name)

    async def control(self, order: BatchControl) -> BatchControlResult:
        await self.check_health()
        if self.fails_with is not None:
            raise self.fails_with
        self.orders.append(order)
        return BatchControlResult(
            previous_running=9,
            new_running=7,
            evicted_request_ids=("cmpl-1-0",),
            estimated_watts_saved=6.4,
            new_max_num_seqs=order.max_num_seqs or 32,
            new_max_prefill_tokens=order.max_prefill_tokens or 512,
        )

    async def _answers(
        self, key: str, prompt: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[CompletionDelta, None]:
        if self.embedding_size or self.scoring is not None:
            await asyncio.sleep(self.delay)
            yield self._embedded(key, prompt)
            return
        answer = [token for token in prompt if token != BOS] or [ord("!")]
        texts = self.script or list(map(chr, answer))
        if self.script:
            answer = list(self.script_tokens) or [ord("a")] * len(texts)
        last = min(len(answer), params.max_tokens or math.inf)
        for step in range(1, int(last) + 1):
            await asyncio.sleep(self.delay)
            if self.dies_after is not None and step > self.dies_after:
                self.is_alive = False
                raise EngineDead("the core ended with exit code 9: restart the server")
            reason = None
            if step == last:
                reason = "length" if last < len(answer) else "stop"
            if self.aborts:
                reason = "abort"
            token = answer[step - 1]
            for index in range(params.n):
                yield CompletionDelta(
                    request_id=key,
                    index=index,
                    text=texts[step - 1],
                    token_ids=(token,),
                    logprobs=_logprobs(token, params),
                    finish_reason=reason,
                    stop_reason=self.stop_reason if reason == "stop" else None,
                    num_prompt_tokens=len(prompt),
                    num_cached_tokens=1,
                    request_status=self.request_status,
                    queue_s=self.queue_s if step == 1 else None,
                    away_s=self.away_s,
                    num_preemptions=self.num_preemptions,
                    prompt_logprobs=_prompt_logprobs(prompt, params) if step == 1 else None,
                )

    def _embedded(self, key: str, prompt: Sequence[int]) -> CompletionDelta:
        if self.scoring is not None:
            result = np.array([list(prompt).count(ord("a"))], np.float32)
        else:
            result = np.zeros(self.embedding_size, np.float32)
            np.add.at(result, np.array(prompt) % self.embedding_size, 1)
        return CompletionDelta(
            request_id=key,
            index=0,
            text="",
            token_ids=(),
            finish_reason="abort" if self.aborts else "stop",
            num_prompt_tokens=len(prompt),
            num_cached_tokens=1,
            queue_s=self.queue_s,
            embedding=None if self.aborts else result.tobytes(),
        )


def _prompt_logprobs(
    prompt: Sequence[int], params: SamplingParams
) -> tuple[PromptLogprobs | None, ...] | None:
    if params.prompt_logprobs is None:
        return None
    top = tuple(TokenLogprob(65 + rank, -1.0 - rank) for rank in range(params.prompt_logprobs))
    positions = [PromptLogprobs(TokenLogprob(token, -7.0), top, 9) for token in prompt[1:]]
    return (None, *positions)


def _logprobs(token: int, params: SamplingParams) -> tuple[PositionLogprobs, ...]:
    if params.logprobs is None:
        return ()
    listed = params.logprob_token_ids or range(65, 65 + params.logprobs)
    top = tuple(TokenLogprob(token, -1.0 - rank) for rank, token in enumerate(listed))
    return (PositionLogprobs(TokenLogprob(token, -math.inf), top),)
