"""TLS settings of server and client: paths of PEM files, checked when they are constructed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs

from trencadis.scheduler.errors import ConfigError


def _path(value: str | Path | None) -> Path | None:
    return None if value is None else Path(value)


def _file(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value is not None and not value.is_file():
        raise ConfigError(f"{attribute.name} {str(value)!r} is not a file: give a PEM file's path")


@attrs.frozen(kw_only=True)
class ServerTls:
    """The sidecar's certificate and key. The metadata of each field has its ``help`` text.

    Raises `ConfigError`.
    """

    certificate: Path = attrs.field(
        converter=Path,
        validator=_file,
        metadata={"help": "PEM file with the server's certificate chain."},
    )
    key: Path = attrs.field(
        converter=Path,
        validator=_file,
        metadata={"help": "PEM file with the server's private key."},
    )
    client_authority: Path | None = attrs.field(
        default=None,
        converter=_path,
        validator=_file,
        metadata={
            "help": "PEM file of the authority that must have signed the clients' certificates "
            "(mutual TLS); without it clients need no certificate."
        },
    )


@attrs.frozen(kw_only=True)
class ClientTls:
    """Which server the client trusts, and the client's own certificate.

    The metadata of each field has its ``help`` text. Raises `ConfigError`.
    """

    authority: Path | None = attrs.field(
        default=None,
        converter=_path,
        validator=_file,
        metadata={
            "help": "PEM file of the authority that signed the sidecar's certificate; None: the "
            "system's root certificates."
        },
    )
    certificate: Path | None = attrs.field(
        default=None,
        converter=_path,
        validator=_file,
        metadata={"help": "PEM file with the client's certificate chain, for mutual TLS."},
    )
    key: Path | None = attrs.field(
        default=None,
        converter=_path,
        validator=_file,
        metadata={"help": "PEM file with the client's private key, for mutual TLS."},
    )
    server_name: str | None = attrs.field(
        default=None,
        metadata={"help": "Name in the sidecar's certificate, if it is not that of the address."},
    )

    def __attrs_post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("a client certificate needs its key: give both, or neither")


def read_pem(path: Path) -> bytes:
    """The bytes of a PEM file. Raises `ConfigError` if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
