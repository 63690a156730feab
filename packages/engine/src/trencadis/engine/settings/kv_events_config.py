"""The settings of KV events, under the names of vLLM's ``KVEventsConfig``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from trencadis.engine.errors import ConfigError, shown
from trencadis.engine.validators import Validator, boolean, integer, is_text, one_of, text

_MOST = (1 << 31) - 1
_MOST_KEPT = 1 << 20


def _is_endpoint(value: Any) -> bool:
    return is_text(value) and value.startswith(("tcp://", "ipc://")) and not value.endswith(":0")


_ENDPOINT = Validator(
    "an address of ZeroMQ",
    _is_endpoint,
    remedy="give tcp://HOST:PORT, tcp://*:PORT or ipc://PATH",
)


@attrs.frozen(kw_only=True)
class KVEventsConfig:
    """Whether and where the core publishes what its prefix cache gets and loses.

    - ``endpoint``: where subscribers connect. An address with ``*``, ``::`` or this host's loopback
      address, and ``ipc:``, is bound; to any other one the core connects. Loopback by default,
      where vLLM's is every interface: events carry token ids and salts of prompts in clear.
    - ``replay_endpoint``: where a subscriber asks for the last ``buffer_steps`` batches; bound.
    - ``hwm``: batches that ZeroMQ keeps for a slow subscriber, which then misses some.
    - ``max_queue_size``: batches that wait to be encoded; above it events are told later, together.
    - ``topic``: the first frame of each message; llm-d wants ``kv@POD@MODEL``.
    """

    enable_kv_cache_events: bool = attrs.field(default=False, validator=boolean())
    publisher: str = attrs.field(default="zmq", validator=one_of(("zmq", "null")))
    endpoint: str = attrs.field(default="tcp://127.0.0.1:5557", validator=_ENDPOINT)
    replay_endpoint: str | None = attrs.field(
        default=None, validator=attrs.evolve(_ENDPOINT, optional=True)
    )
    buffer_steps: int = attrs.field(default=10_000, validator=integer(0, _MOST_KEPT))
    hwm: int = attrs.field(default=100_000, validator=integer(1, _MOST))
    max_queue_size: int = attrs.field(default=100_000, validator=integer(1, _MOST))
    topic: str = attrs.field(default="", validator=text())

    @property
    def publishes(self) -> bool:
        """Whether anything is published."""
        return self.enable_kv_cache_events and self.publisher != "null"

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> KVEventsConfig:
        """These settings. Raises `ConfigError`, which names the one that is wrong or unknown."""
        if not isinstance(settings, Mapping):
            raise ConfigError(
                f"kv_events_config must be an object, got {shown(settings)}: give one, as in "
                '{"enable_kv_cache_events": true}',
                "kv_events_config",
            )
        names = [field.name for field in attrs.fields(cls)]
        for name in settings:
            if name not in names:
                raise ConfigError(
                    f"kv_events_config has no setting {shown(name)}: its settings are "
                    f"{', '.join(names)}",
                    "kv_events_config",
                )
        try:
            return cls(**settings)
        except ConfigError as error:
            raise ConfigError(f"kv_events_config: {error}", "kv_events_config") from error
