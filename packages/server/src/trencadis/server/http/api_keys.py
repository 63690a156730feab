"""API keys and the names of their owners.

Logs, metrics and the engine have the names alone; a key is kept as its digest.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

import attrs
from starlette.types import Scope

from trencadis.engine import ConfigError
from trencadis.server.settings import ServerSettings

_MAX_FILE_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
_OF_OTHERS = stat.S_IRWXO | stat.S_IWGRP
"""Permissions that a file of keys must not have. A group may read it, as that of a container."""

_SCOPE_KEY = "trencadis.api_key"
_SCOPE_OWNER = "trencadis.api_key_owner"
_DIGEST = "sha256:"
"""Begins the owner of an unnamed key; no name of a key has a colon."""


def digest(key: str) -> bytes:
    """What is kept and compared of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def key_name(scope: Scope) -> str:
    """The name of the API key that a request was accepted with; "" without one."""
    name: str = scope.get(_SCOPE_KEY, "")
    return name


def key_owner(scope: Scope) -> str:
    """Who owns what a request stores on disk; "" without an API key.

    The name of a key of ``api_key_file``. The name of another key is its position on the command
    line, which another key has once keys have changed: its owner is a digest.
    """
    owner: str = scope.get(_SCOPE_OWNER, "")
    return owner


def accept_name(scope: Scope, name: str) -> None:
    """Make a request of this process one of the API key with this name."""
    scope[_SCOPE_KEY] = name


@attrs.frozen
class _ApiKey:
    name: str
    digest: bytes = attrs.field(repr=False)
    owner: str = attrs.field(repr=False)


class ApiKeys:
    """The accepted API keys. Several may have the same name, as while a key is replaced."""

    def __init__(self, keys: Iterable[_ApiKey]) -> None:
        self._keys = tuple(keys)

    @classmethod
    def of(cls, settings: ServerSettings) -> ApiKeys:
        """The keys of ``api_keys`` and those of the file ``api_key_file``.

        A key of ``api_keys`` is named by its number, from ``key-1`` on: names are in the metrics,
        which are open. Raises `ConfigError` for a file that cannot be read, that other users may
        read or write, that has no keys, or a key of ``api_keys``.
        """
        keys = [
            _ApiKey(f"key-{number}", digest(key), f"{_DIGEST}{digest(key).hex()}")
            for number, key in enumerate(settings.api_keys, 1)
        ]
        if settings.api_key_file is not None:
            accepted = {key.digest for key in keys}
            for key in _read(Path(settings.api_key_file)):
                if key.digest in accepted:
                    raise ConfigError(
                        f"api_key_file {settings.api_key_file} has under the name {key.name} a key "
                        "of --api-key or VLLM_API_KEY: give it in one place, for its name",
                        "api_key_file",
                    )
                keys.append(key)
        return cls(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def name_of(self, owner: str) -> str:
        """The name of the key of an owner; "" for an unnamed key that is not accepted any more."""
        if not owner.startswith(_DIGEST):
            return owner
        return next((key.name for key in self._keys if key.owner == owner), "")

    def accept(self, key: str, scope: Scope) -> bool:
        """Whether a key is accepted; notes its name and owner in ``scope``.

        The comparison covers the digests of all keys, so that its duration reveals no length,
        prefix or position of a key.
        """
        received = digest(key)
        matches = [hmac.compare_digest(received, each.digest) for each in self._keys]
        if not any(matches):
            return False
        accepted = self._keys[matches.index(True)]
        scope[_SCOPE_KEY], scope[_SCOPE_OWNER] = accepted.name, accepted.owner
        return True


def _read(path: Path) -> list[_ApiKey]:
    """The keys of a file. Errors name the line, and never show what is in it."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(f"api_key_file {path} is not a regular file", "api_key_file")
            if mode & _OF_OTHERS:
                raise ConfigError(
                    f"api_key_file {path} has the mode {stat.S_IMODE(mode):04o}, so that other "
                    "users may read or change the keys: chmod 600",
                    "api_key_file",
                )
            content = file.read(_MAX_FILE_BYTES + 1)
        text = content.decode()
    except OSError as error:
        raise ConfigError(
            f"api_key_file {path} cannot be read: {error.strerror}", "api_key_file"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"api_key_file {path} is not text in UTF-8", "api_key_file") from None
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError(
            f"api_key_file {path} has more than {_MAX_FILE_BYTES} bytes", "api_key_file"
        )
    keys: dict[bytes, _ApiKey] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        key = _parsed(line, f"api_key_file {path}, line {number}")
        if key.digest in keys:
            raise ConfigError(
                f"api_key_file {path}, line {number}: the key is in an earlier line, too",
                "api_key_file",
            )
        keys[key.digest] = key
    if not keys:
        raise ConfigError(
            f"api_key_file {path} has no keys: give each a line with a name and the key",
            "api_key_file",
        )
    return list(keys.values())


def _parsed(line: str, where: str) -> _ApiKey:
    parts = line.split()
    if len(parts) != 2:
        raise ConfigError(
            f"{where} must have a name and a key, with a space between", "api_key_file"
        )
    name, key = parts
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{where}: a name has 1 to 64 letters, digits and _ . @ -", "api_key_file"
        )
    return _ApiKey(name, digest(key), owner=name)
