"""OpenAI's client of a server of the tests."""

from __future__ import annotations

from contextlib import asynccontextmanager

import openai


@asynccontextmanager
async def client_of(url: str, key: str = "none"):
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60
    ) as client:
        yield client
