"""The flags that name a running server and its model."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

import openai

from trencadis.engine.settings import described

TIMEOUT = 600.0
"""Seconds without a byte of an answer, after which a request has failed."""


def add_connection_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--url``, ``--model`` and ``--api-key``."""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--url",
        default="http://127.0.0.1:8000/v1",
        help="where the API is, with the /v1 of its paths (default: %(default)s)",
    )
    group.add_argument("--model", metavar="NAME", help="default: the first model of the server")
    group.add_argument(
        "--api-key",
        metavar="KEY",
        default=os.environ.get("VLLM_API_KEY") or os.environ.get("OPENAI_API_KEY") or "none",
        help="default: that of VLLM_API_KEY or OPENAI_API_KEY",
    )


def client_options(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of an OpenAI client for the server that the flags name."""
    return {
        "base_url": args.url,
        "api_key": args.api_key,
        "timeout": TIMEOUT,
        "max_retries": 0,
    }


def reason_of(error: Exception, url: str) -> str:
    """Why a command failed, and for a server that was not reached, what to do."""
    if isinstance(error, openai.APIConnectionError):
        return (
            f"no server answers at {url} ({error.__cause__ or error}): start engine-serve, or name "
            "its address with --url"
        )
    address = url.rstrip("/")
    if isinstance(error, openai.NotFoundError) and not address.endswith("/v1"):
        return f"{url} is not the address of an API: name {address}/v1 with --url"
    return described(error)


def first_of(models: Sequence[str], url: str) -> str:
    """The first model of a server. Raises `ValueError` where it has none."""
    if not models:
        raise ValueError(f"the server at {url} lists no model: name one with --model")
    return models[0]
