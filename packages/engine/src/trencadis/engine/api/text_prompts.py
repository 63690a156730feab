"""The prompts that the checkpoint of an embedding model declares for its texts."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trencadis.engine.errors import InvalidRequest


@attrs.frozen
class TextPrompts:
    """Prompts by name, and the name of the one that is put before every text; None for none.

    They are those of sentence-transformers, whose ``encode`` uses them in the same way.
    """

    texts: dict[str, str] = attrs.field(factory=dict)
    default: str | None = None

    def prefix(self, name: str | None = None) -> str:
        """What is put before a text. Raises `InvalidRequest` for a prompt that there is not."""
        if name is None:
            name = self.default
        if name is None:
            return ""
        if not isinstance(name, str) or name not in self.texts:
            known = ", ".join(map(repr, self.texts)) or "none"
            raise InvalidRequest(
                f"Unsupported prompt_name {name!r}, none of this model's prompts ({known}): leave "
                "it out, or write what the model wants into the text",
                "prompt_name",
            )
        return self.texts[name]


def check_named_texts(name: str | None, prompts: Sequence[object]) -> None:
    """Raise `InvalidRequest` for token ids with the name of a prompt: it is put before texts."""
    if name is not None and not all(isinstance(prompt, str) for prompt in prompts):
        raise InvalidRequest(
            "prompt_name names what is put before texts, and token ids stay unchanged: leave it "
            "out, or send texts",
            "prompt_name",
        )
