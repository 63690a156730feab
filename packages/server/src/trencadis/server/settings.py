"""Settings of the HTTP layer alone; those of the engine are `trencadis.engine.EngineConfig`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from trencadis.engine import ConfigError
from trencadis.engine.settings import (
    parse_flag,
    parse_json_object,
    parse_size,
    setting,
    setting_field,
)
from trencadis.engine.validators import boolean, integer, number, one_of, text

MIB = 1024 * 1024
SERVER = "server"
CHAT = "tools and reasoning"
MODELS = "several models"
"""Groups of flags in ``--help``."""

_PATH_PREFIX = re.compile(r"(/[A-Za-z0-9_.~-]+)+")

RESERVED_TEMPLATE_NAMES = frozenset(
    {
        *("messages", "conversation", "conversations", "chat_template", "tools", "documents"),
        *("add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation"),
        *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        *("tokenizer_kwargs", "processor_kwargs"),
    }
)
"""Arguments of a chat template that neither a client nor a setting may give."""

_seconds = number(0, 86_400, exclusive_low=True)


def _texts(values: str | Iterable[str]) -> tuple[str, ...]:
    """A single text is one value: as a list, each of its letters would be one."""
    if isinstance(values, str):
        return (values,)
    # What is not a list is left to the validator, which names the field.
    return tuple(values) if isinstance(values, Iterable) else (values,)


def _path_prefix(_: object, attribute: attrs.Attribute[Any], path: object) -> None:
    if not isinstance(path, str) or (path and not _PATH_PREFIX.fullmatch(path)):
        raise ConfigError(
            f"{attribute.name} must begin with / and not end with it, as in /llm, got {path!r}",
            attribute.name,
        )


def _template_arguments(_: object, attribute: attrs.Attribute[Any], arguments: object) -> None:
    if not isinstance(arguments, Mapping) or not all(isinstance(name, str) for name in arguments):
        raise ConfigError(
            f"{attribute.name} must map names to values, as in {{'enable_thinking': False}}, got "
            f"{arguments!r}",
            attribute.name,
        )
    reserved = sorted(RESERVED_TEMPLATE_NAMES & arguments.keys())
    if reserved:
        raise ConfigError(
            f"{attribute.name} may not set {', '.join(reserved)}, which the server sets: leave "
            "it out",
            attribute.name,
        )


def _no_blank_text(_: object, attribute: attrs.Attribute[Any], texts: tuple[str, ...]) -> None:
    if not all(isinstance(text, str) and text.strip() for text in texts):
        sources = (*attribute.metadata["flags"], attribute.metadata["env"])
        raise ConfigError(
            f"{attribute.name} has a blank value: give {' or '.join(filter(None, sources))} a text",
            attribute.name,
        )


@attrs.frozen(kw_only=True)
class ServerSettings:
    """How the server listens, which clients it accepts, and how long it waits.

    `docs/server/settings.md` lists meaning, default and flag of each. Raises `ConfigError` on a
    value out of range.
    """

    host: str = setting_field(
        "127.0.0.1", text(), "--host", metavar="ADDRESS", group=SERVER, help="address to listen on"
    )
    port: int = setting_field(
        8000,
        integer(0, 65_535),
        "--port",
        metavar="N",
        group=SERVER,
        help="port to listen on; 0 takes any free port",
    )
    uds: str | None = setting_field(
        None,
        text(optional=True),
        "--uds",
        metavar="PATH",
        group=SERVER,
        help="Unix socket to listen on, instead of --host and --port",
        default="none",
    )
    root_path: str = setting_field(
        "",
        _path_prefix,
        "--root-path",
        metavar="PATH",
        group=SERVER,
        help="prefix of all paths at the proxy before this server, as in /llm",
        default="none",
    )
    allowed_hosts: tuple[str, ...] = attrs.field(
        default=(),
        converter=_texts,
        validator=_no_blank_text,
        metadata=setting(
            "--allowed-hosts",
            metavar="HOST",
            group=SERVER,
            repeated=True,
            help="accept only requests whose Host header is this name or, for *.NAME, ends in it; "
            "not for probes and metrics",
            default="all",
        ),
    )
    api_keys: tuple[str, ...] = attrs.field(
        default=(),
        converter=_texts,
        validator=_no_blank_text,
        repr=False,
        metadata=setting(
            "--api-key",
            env="VLLM_API_KEY",
            metavar="KEY",
            group=SERVER,
            repeated=True,
            secret=True,
            help="accept only requests to /v1, /v2 and other paths of clients that carry this "
            "bearer token",
            default="none: accept all",
        ),
    )
    api_key_file: str | None = setting_field(
        None,
        text(optional=True),
        "--api-key-file",
        metavar="FILE",
        group=SERVER,
        help="accept the keys of this file, too: lines with a name and a key. The names are in "
        "metrics and logs",
        default="none",
    )
    fair_share: str = setting_field(
        # Named keys are of different clients, of which one could make the others wait for minutes.
        attrs.Factory(lambda self: "none" if self.api_key_file is None else "key", takes_self=True),
        one_of(("none", "key")),
        "--fair-share",
        group=SERVER,
        help="key: of the API keys whose requests wait, the one that got the fewest tokens is "
        "served next; none: keys do not change the order of requests",
        default="key with --api-key-file, otherwise none",
    )
    max_requests_per_key: int | None = setting_field(
        None,
        integer(1, 2**31 - 1, optional=True),
        "--max-requests-per-key",
        metavar="N",
        group=SERVER,
        help="most requests of an API key in progress; more get status 429",
        default="no limit",
    )
    tool_call_parser: str = setting_field(
        "auto",
        text(),
        "--tool-call-parser",
        metavar="NAME",
        group=CHAT,
        help="how the model writes tool calls: hermes, llama3_json, mistral, deepseek_v3, "
        "granite, internlm, pythonic, openai, module:Class, auto (by its chat template) or none",
    )
    reasoning_parser: str = setting_field(
        "auto",
        text(),
        "--reasoning-parser",
        metavar="NAME",
        group=CHAT,
        help="how the model writes its reasoning: qwen3, deepseek_r1, granite, "
        "openai_gptoss, module:Class, auto (by its chat template) or none",
    )
    enable_auto_tool_choice: bool = setting_field(
        False,
        boolean(),
        "--enable-auto-tool-choice",
        group=CHAT,
        help="do not start without a tool call parser, with which models choose tools",
    )
    enable_force_include_usage: bool = setting_field(
        False,
        boolean(),
        "--enable-force-include-usage",
        group=SERVER,
        help="completions and chat: every chunk has token counts",
    )
    return_tokens_as_token_ids: bool = setting_field(
        False,
        boolean(),
        "--return-tokens-as-token-ids",
        group=SERVER,
        help="log-probabilities write tokens as token_id:N",
    )
    enable_tokenizer_info_endpoint: bool = setting_field(
        False,
        boolean(),
        "--enable-tokenizer-info-endpoint",
        group=SERVER,
        help="answer GET /tokenizer_info",
    )
    enable_request_id_headers: bool = setting_field(
        False,
        boolean(),
        "--enable-request-id-headers",
        group=SERVER,
        help="also probes have X-Request-Id",
    )
    default_chat_template_kwargs: Mapping[str, Any] = attrs.field(
        factory=dict,
        validator=_template_arguments,
        metadata=setting(
            "--default-chat-template-kwargs",
            metavar="JSON",
            group=CHAT,
            parse=parse_json_object,
            help="default arguments of the chat template, as in '{\"enable_thinking\": false}'",
            default="none",
        ),
    )
    responses_store: bool = setting_field(
        False,
        boolean(),
        env="VLLM_ENABLE_RESPONSES_API_STORE",
        parse=parse_flag,
        help="whether /v1/responses stores responses",
    )
    responses_store_size: int = setting_field(
        64 * MIB,
        integer(1024, 1 << 40),
        "--responses-store-size",
        metavar="SIZE",
        group=SERVER,
        parse=parse_size,
        help="most bytes of stored responses",
    )
    responses_store_ttl: float = setting_field(
        86_400.0, _seconds, help="most seconds that a response is made, then stored"
    )
    batch_directory: str | None = setting_field(
        None,
        text(optional=True),
        "--batch-directory",
        metavar="DIRECTORY",
        group=SERVER,
        help="keep files and batches of /v1/files and /v1/batches here, across restarts",
        default="none: no batches",
    )
    prefix_cache_per_key: bool = setting_field(
        False,
        boolean(),
        "--prefix-cache-per-key",
        group=SERVER,
        help="requests of different API keys share no cached prefixes, so that their times "
        "reveal nothing about the prompts of other keys",
    )
    admin_keys: tuple[str, ...] = attrs.field(
        default=(),
        converter=_texts,
        validator=_no_blank_text,
        repr=False,
        metadata=setting(
            "--admin-api-key",
            env="VLLM_ADMIN_TOKEN",
            metavar="KEY",
            group=SERVER,
            repeated=True,
            secret=True,
            help="open /v1/admin to requests that carry this bearer token",
            default="none: closed",
        ),
    )
    lora_directories: tuple[str, ...] = attrs.field(
        default=(),
        converter=_texts,
        validator=_no_blank_text,
        metadata=setting(
            "--lora-directory",
            metavar="DIRECTORY",
            group=SERVER,
            repeated=True,
            help="administrators may load adapters from below this directory while the server runs",
            default="none",
        ),
    )
    enable_admin_api: bool = setting_field(
        False,
        boolean(),
        "--enable-admin-api",
        group=SERVER,
        help="do not start without an admin key, which opens /v1/admin",
    )
    admin_rate_limit: float = setting_field(
        10.0,
        number(0, 1e6, exclusive_low=True),
        "--admin-rate-limit",
        metavar="N",
        group=SERVER,
        help="most calls of /v1/admin per second, and at once; more get status 429",
    )
    admin_signature_window: float | None = setting_field(
        None,
        number(0, 3600, exclusive_low=True, optional=True),
        "--admin-signature-window",
        metavar="SECONDS",
        group=SERVER,
        help="accept only calls of /v1/admin that are signed with an admin key, for this long "
        "and once; needs --allowed-hosts",
        default="none: bearer tokens",
    )
    admin_host: str | None = setting_field(
        None,
        text(optional=True),
        "--admin-host",
        metavar="ADDRESS",
        group=SERVER,
        help="address of the port for /v1/admin",
        default="that of --host",
    )
    admin_port: int | None = setting_field(
        None,
        integer(0, 65_535, optional=True),
        "--admin-port",
        metavar="N",
        group=SERVER,
        help="port for /v1/admin alone; 0 takes any free port",
        default="that of --port",
    )
    server_dev_mode: bool = setting_field(
        False,
        boolean(),
        env="VLLM_SERVER_DEV_MODE",
        parse=parse_flag,
        help="whether POST /v1/models/switch, POST /sleep, POST /wake_up and GET /is_sleeping "
        "exist; without an admin key they are open to all clients that --api-key admits",
    )
    multi_model_config: str | None = setting_field(
        None,
        text(optional=True),
        "--multi-model-config",
        env="VLLM_HPU_MULTI_MODEL_CONFIG",
        metavar="FILE",
        group=MODELS,
        help="models between which the server switches, in YAML",
        default="none: one model",
    )
    model_stash_gib: float = setting_field(
        16.0,
        number(0, 1 << 20),
        "--model-stash-gib",
        metavar="GIB",
        group=MODELS,
        help="most host memory for the weights of models that are not active; a switch to one "
        "of these is quick",
    )
    auto_switch: bool = setting_field(
        False,
        boolean(),
        "--auto-switch",
        group=MODELS,
        help="a request for a model that is not active waits for a switch; otherwise it is "
        "rejected",
    )
    min_model_stay: float = setting_field(
        30.0,
        _seconds,
        "--min-model-stay",
        metavar="SECONDS",
        group=MODELS,
        help="shortest time between a switch and one that requests ask for",
    )
    max_switch_waiting: int = setting_field(
        256,
        integer(1, 2**31 - 1),
        "--max-switch-waiting",
        metavar="N",
        group=MODELS,
        help="most requests that wait for a switch; more get status 503",
    )
    otlp_traces_endpoint: str | None = setting_field(
        None,
        text(optional=True),
        "--otlp-traces-endpoint",
        env="OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
        metavar="URL",
        group=SERVER,
        help="OpenTelemetry collector for a trace of each request, as in "
        "http://collector:4318/v1/traces (OTLP over HTTP)",
        default="none: no traces",
    )
    ssl_certfile: str | None = setting_field(
        None,
        text(optional=True),
        "--ssl-certfile",
        metavar="FILE",
        group=SERVER,
        help="certificate of this server (PEM): listen with TLS",
        default="none: without TLS",
    )
    ssl_keyfile: str | None = setting_field(
        None,
        text(optional=True),
        "--ssl-keyfile",
        metavar="FILE",
        group=SERVER,
        help="private key of the certificate (PEM)",
        default="in the certificate's file",
    )
    ssl_ca_certs: str | None = setting_field(
        None,
        text(optional=True),
        "--ssl-ca-certs",
        metavar="FILE",
        group=SERVER,
        help="authorities that sign the certificates of clients (PEM)",
        default="none",
    )
    ssl_cert_reqs: int = setting_field(
        0,
        integer(0, 2),
        "--ssl-cert-reqs",
        metavar="N",
        group=SERVER,
        help="whether clients need a certificate: 0 none, 1 optional, 2 required",
    )
    max_body_size: int = setting_field(
        4 * MIB,
        integer(1, 1 << 40),
        "--max-body-size",
        metavar="SIZE",
        group=SERVER,
        parse=parse_size,
        help="most bytes of a request, as in 8MiB",
    )
    max_connections: int | None = setting_field(
        None,
        integer(1, 1 << 20, optional=True),
        "--max-connections",
        metavar="N",
        group=SERVER,
        help="most open connections; further ones are rejected with 503",
        default="what the limit of open files allows, at most 16384",
    )
    header_timeout: float = setting_field(
        10.0, _seconds, help="seconds for a client to send the headers of a request"
    )
    max_pending_prompts: int = setting_field(
        256, integer(1, 2**31 - 1), help="most prompts that wait for the tokenizer"
    )
    body_timeout: float = setting_field(
        30.0, _seconds, help="seconds for a client to send its request"
    )
    send_timeout: float = setting_field(
        60.0, _seconds, help="seconds for a client to receive one streamed event"
    )
    health_timeout: float = setting_field(
        5.0, _seconds, help="seconds for the engine to answer a health check"
    )
    shutdown_timeout: float = setting_field(
        10.0,
        _seconds,
        "--shutdown-timeout",
        metavar="SECONDS",
        group=SERVER,
        help="seconds for running requests to finish after SIGTERM or Ctrl-C",
    )
    retry_after: int = setting_field(
        1, integer(1, 86_400), help="seconds that a rejected client is told to wait"
    )
    access_log: bool = setting_field(
        True, boolean(), "--disable-access-log", group=SERVER, help="do not log requests"
    )

    def __attrs_post_init__(self) -> None:
        self._check_keys()
        if self.enable_admin_api and not self.admin_keys:
            raise ConfigError(
                "enable_admin_api needs an admin key: set VLLM_ADMIN_TOKEN, or leave out "
                "--enable-admin-api",
                "enable_admin_api",
            )
        if self.admin_signature_window is not None and not self.admin_keys:
            raise ConfigError(
                "admin_signature_window needs an admin key: set VLLM_ADMIN_TOKEN, or leave out "
                "--admin-signature-window",
                "admin_signature_window",
            )
        if self.admin_signature_window is not None and not all(
            key.isascii() for key in self.admin_keys
        ):
            raise ConfigError(
                "admin_signature_window needs admin keys of ASCII characters, as tools encode "
                "others in different ways: choose other keys",
                "admin_signature_window",
            )
        if self.admin_signature_window is not None and not self.allowed_hosts:
            raise ConfigError(
                "admin_signature_window needs the names of this server, or a call to another "
                "server with the same key could be repeated here: give --allowed-hosts",
                "admin_signature_window",
            )
        if self.admin_host is not None and self.admin_port is None:
            raise ConfigError(
                f"admin_host {self.admin_host!r} has no port: give --admin-port too", "admin_host"
            )
        has_port = self.uds is None
        if has_port and self.admin_port is not None and self.admin_port == self.port != 0:
            raise ConfigError(
                f"admin_port {self.admin_port} is that of the server: choose another", "admin_port"
            )
        if self.ssl_certfile is None and (
            self.ssl_keyfile is not None or self.ssl_ca_certs is not None or self.ssl_cert_reqs
        ):
            raise ConfigError(
                "ssl_keyfile, ssl_ca_certs and ssl_cert_reqs have no certificate: give "
                "--ssl-certfile, or leave them out",
                "ssl_certfile",
            )
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError(
                f"ssl_cert_reqs {self.ssl_cert_reqs} needs the authorities of clients: give "
                "--ssl-ca-certs",
                "ssl_ca_certs",
            )

    def _check_keys(self) -> None:
        """Raise `ConfigError` for a setting of API keys without any."""
        if self.has_api_keys:
            return
        chosen = {
            "prefix_cache_per_key": self.prefix_cache_per_key,
            "fair_share": self.fair_share != "none",
            "max_requests_per_key": self.max_requests_per_key is not None,
        }
        for name, is_chosen in chosen.items():
            if is_chosen:
                raise ConfigError(
                    f"{name} needs API keys: give --api-key, VLLM_API_KEY or --api-key-file, or "
                    f"leave out --{name.replace('_', '-')}",
                    name,
                )

    @property
    def has_api_keys(self) -> bool:
        """Whether requests to ``/v1`` need a key."""
        return bool(self.api_keys) or self.api_key_file is not None
