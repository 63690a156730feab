"""Settings of the HTTP layer alone; those of the engine are `trencadis.engine.EngineConfig`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import attrs

from trencadis.engine import ConfigError

MIB = 1024 * 1024


def _integer(low: int, high: int | None = None) -> Any:
    accepted = f"an integer of at least {low}" if high is None else f"from {low} to {high}"

    def check(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or value < low or (high is not None and value > high):
            raise ConfigError(f"{attribute.name} must be {accepted}, got {value!r}")

    return check


def _seconds(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or math.isnan(value) or not 0 < value <= 86_400:
        raise ConfigError(
            f"{attribute.name} must be above 0 and at most 86400 seconds, got {value!r}"
        )


def _strings(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(values)


@attrs.frozen(kw_only=True)
class ServerSettings:
    """How the server listens, whom it lets in, and how long it waits.

    ``port`` 0 takes any free port. ``api_keys`` guards ``/v1`` with a bearer token; empty leaves
    it open. ``admin_keys`` open ``/v1/admin``, which is closed without them. ``max_body_size`` is
    in bytes. Timeouts are in seconds: ``body_timeout`` for a client to deliver its request,
    ``send_timeout`` for a client to take one streamed event,
    ``health_timeout`` for the engine to answer a health check, ``shutdown_timeout`` for running
    requests to finish once the server was told to stop. ``max_pending_prompts`` bounds the
    prompts that wait for the tokenizer. ``retry_after`` (seconds) is what a refused client is
    told to wait. Raises `ConfigError` on a value out of range.
    """

    host: str = "127.0.0.1"
    port: int = attrs.field(default=8000, validator=_integer(0, 65535))
    api_keys: tuple[str, ...] = attrs.field(default=(), converter=_strings, repr=False)
    admin_keys: tuple[str, ...] = attrs.field(default=(), converter=_strings, repr=False)
    max_body_size: int = attrs.field(default=4 * MIB, validator=_integer(1))
    max_pending_prompts: int = attrs.field(default=256, validator=_integer(1))
    body_timeout: float = attrs.field(default=30.0, validator=_seconds)
    send_timeout: float = attrs.field(default=60.0, validator=_seconds)
    health_timeout: float = attrs.field(default=5.0, validator=_seconds)
    shutdown_timeout: float = attrs.field(default=10.0, validator=_seconds)
    retry_after: int = attrs.field(default=1, validator=_integer(1))
    access_log: bool = True

    @api_keys.validator
    def _no_blank_key(self, _: object, value: tuple[str, ...]) -> None:
        if not all(isinstance(key, str) and key.strip() for key in value):
            raise ConfigError("an API key is blank: give --api-key or VLLM_API_KEY a value")

    @admin_keys.validator
    def _no_blank_admin_key(self, _: object, value: tuple[str, ...]) -> None:
        if not all(isinstance(key, str) and key.strip() for key in value):
            raise ConfigError(
                "an admin key is blank: give --admin-api-key or VLLM_ADMIN_TOKEN a value"
            )
