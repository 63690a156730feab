"""Chat templates that a user gives."""

from __future__ import annotations

from pathlib import Path

from trencadis.engine.errors import ConfigError, shown


def template_text(template: str) -> str:
    """The text of a template that is given as itself, or as the name of its file.

    Raises `ConfigError` for a file that cannot be read.
    """
    if "{{" in template or "{%" in template:
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a null character in the name
        raise ConfigError(
            f"chat_template {shown(template)} cannot be read: {error}", "chat_template"
        ) from error
