"""A program puts the HTTP API in front of an engine, this repository's or its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI
from typing_extensions import assert_type

from trencadis.engine import (
    AsyncEngine,
    BatchControl,
    BatchControlResult,
    CompletionDelta,
    EngineConfig,
    EngineRequest,
    EngineStats,
    Scoring,
    TextPrompts,
)
from trencadis.server import (
    AdapterEngine,
    EmbeddingEngine,
    LaunchError,
    PromptingEngine,
    ScoringEngine,
    ServerSettings,
    ServingTokenizer,
    create_app,
    serve,
)


class Letters:
    """A tokenizer of the user's own: it implements `ServingTokenizer` without deriving from it."""

    vocab_size = 256
    chat_template: str | None = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(token_ids).decode()

    def min_num_tokens(self, length: int) -> int:
        return length

    def token_text(self, token_id: int) -> str:
        return chr(token_id)

    def token_piece(self, token_id: int) -> str:
        return chr(token_id)

    def token_bytes(self, token_id: int, skip_special_tokens: bool = False) -> bytes:
        return bytes([token_id])

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        quick: bool | None = None,
    ) -> list[int]:
        return self.encode(str(messages[-1]["content"]))


class Echo:
    """An engine of the user's own: it implements `ServingEngine` without deriving from it."""

    max_model_len = 1024
    model_name = "echo"
    is_alive = True
    stats = EngineStats()

    def __init__(self) -> None:
        self.tokenizer: ServingTokenizer = Letters()

    async def check_health(self) -> None:
        pass

    async def generate(self, request: EngineRequest) -> AsyncGenerator[CompletionDelta, None]:
        ids = request.prompt_token_ids
        text = self.tokenizer.decode(ids)
        yield CompletionDelta(request.request_id or "", 0, text, ids, finish_reason="stop")

    async def control(self, order: BatchControl) -> BatchControlResult:
        raise NotImplementedError


class Vectors(Echo):
    """An engine of the user's own that embeds, and scores nothing."""

    embedding_size = 8
    text_prompts = TextPrompts()
    scoring: Scoring | None = None


def vectors() -> tuple[EmbeddingEngine, PromptingEngine, ScoringEngine]:
    engine = Vectors()
    return engine, engine, engine


def echo_app() -> FastAPI:
    settings = ServerSettings(api_keys=["secret"], max_body_size=2**20, shutdown_timeout=5)
    assert_type(settings.api_keys, tuple[str, ...])
    app = create_app(Echo(), settings)
    assert_type(app, FastAPI)
    return app


async def adapters(engine: AsyncEngine) -> AdapterEngine:
    await engine.load_adapter("sql", "/adapters/sql")
    return engine


async def own_server() -> None:
    engine = await AsyncEngine.start(EngineConfig(model="./my-model"))
    await uvicorn.Server(uvicorn.Config(create_app(engine), port=9000)).serve()
    await engine.stop()


async def whole_server() -> None:
    try:
        await serve(EngineConfig(model="./my-model"), ServerSettings(port=0), announce=print)
    except LaunchError as error:
        print(error)


if __name__ == "__main__":
    asyncio.run(whole_server())
