"""Who could have written a file: compiled code is loaded from this user's own files alone.

Loading a library runs it, so a file that another user could have put there is not loaded.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path


def other_writer(path: Path) -> str | None:
    """Which file or directory on ``path`` another user could have written, in words; else None.

    A file is this user's own if this user or root owns it and each directory above it, and no one
    else can write to any of them. A directory above with the sticky bit (``/tmp``) may be writable:
    there only the owner of an entry can replace it. Raises `OSError` if there is no such file.
    """
    resolved = path.resolve(strict=True)
    for place in (resolved, *resolved.parents):
        if (reason := why_foreign(place.stat(), is_above=place != resolved)) is not None:
            return f"{place} {reason}"
    return None


def other_writer_within(directory: Path) -> str | None:
    """As `other_writer`, of a directory or any file in it."""
    if (reason := other_writer(directory)) is not None:
        return reason
    for path in directory.iterdir():
        if (reason := why_foreign(path.stat())) is not None:
            return f"{path} {reason}"
    return None


def why_foreign(state: os.stat_result, *, is_above: bool = False) -> str | None:
    """Why a file or directory may have been written by another user; None if it cannot have been.

    ``state``: of the file itself, as of an open descriptor, so that it cannot be exchanged between
    the check and the use. ``is_above``: it is a directory above the one that is used.
    """
    if state.st_uid not in (os.getuid(), 0):
        return f"belongs to {_user(state.st_uid)}"
    if is_above and state.st_mode & stat.S_ISVTX:
        return None
    if state.st_mode & stat.S_IWOTH:
        return "can be written by everyone"
    if state.st_mode & stat.S_IWGRP and not _is_private_group(state.st_gid):
        return f"can be written by group {state.st_gid}"
    return None


def _is_private_group(gid: int) -> bool:
    """Whether this user is the only one in a group, as where each user has a group alone."""
    if gid == 0 and os.getuid() == 0:
        return True
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return False
    return group.gr_name == user and set(group.gr_mem) <= {user}


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"
