"""Certificates for the two ends, as files: checked when named, read when used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs

from trencadis.scheduler.errors import ConfigError


def _path(value: str | Path | None) -> Path | None:
    return None if value is None else Path(value)


def _file(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value is not None and not value.is_file():
        raise ConfigError(f"{attribute.name} {str(value)!r} is no file: give a PEM file's path")


@attrs.frozen(kw_only=True)
class ServerTls:
    """The sidecar's certificate chain and key, PEM files.

    With ``client_authority`` only clients are served that show a certificate which it signed
    (mutual TLS). Raises `ConfigError`.
    """

    certificate: Path = attrs.field(converter=Path, validator=_file)
    key: Path = attrs.field(converter=Path, validator=_file)
    client_authority: Path | None = attrs.field(default=None, converter=_path, validator=_file)


@attrs.frozen(kw_only=True)
class ClientTls:
    """Whom the client believes, and who it is.

    ``authority`` signed the sidecar's certificate (None: the system's roots). ``certificate`` and
    ``key`` are for a sidecar that asks for them. ``server_name`` is the name in the sidecar's
    certificate where it is not the address's. Raises `ConfigError`.
    """

    authority: Path | None = attrs.field(default=None, converter=_path, validator=_file)
    certificate: Path | None = attrs.field(default=None, converter=_path, validator=_file)
    key: Path | None = attrs.field(default=None, converter=_path, validator=_file)
    server_name: str | None = None

    def __attrs_post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("a client certificate needs its key: give both, or neither")


def contents(path: Path) -> bytes:
    """The bytes of a PEM file. Raises `ConfigError` if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
