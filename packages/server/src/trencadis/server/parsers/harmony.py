"""The messages of the harmony format, in which gpt-oss writes its answers.

``<|start|>HEADER<|message|>CONTENT<|end|>``: the header has a role, a channel and, for calls, a
recipient. The prompt ends after ``<|start|>assistant``, so an answer begins with the rest of a
header. Source: docs/format.md of github.com/openai/harmony.
"""

from __future__ import annotations

import attrs

from trencadis.server.parsers.text_reader import Reading, TextReader

STOPS = ("<|return|>", "<|call|>")
"""The tokens that end an answer: it is complete, or it calls a tool."""

ENDS = ("<|end|>", *STOPS)
"""What ends a message."""

BEGINS = ("<|start|>", "<|channel|>")
"""What begins a header: the role, or the channel where the prompt has the role."""

RECIPIENT = " to="
"""What else an answer may begin with: a recipient before the channel."""

MARKERS = (*BEGINS, "<|constrain|>", "<|message|>", *ENDS)

_FUNCTIONS = "functions."
_BUILT_IN = ("python", "browser", "container", "assistant")
"""Recipients that are not tools of the client: those of the model's training, and itself."""

_MAX_PARTS = 16
"""Most words and markers of a header that is read. Those of the format have eight."""


@attrs.frozen
class Header:
    """The header of a message. ``channel`` and ``recipient`` are "" where it has none."""

    channel: str = ""
    recipient: str = ""

    @property
    def tool_name(self) -> str | None:
        """The name of the tool that the message calls; None if it calls none."""
        name = self.recipient.removeprefix(_FUNCTIONS)
        if name == self.recipient and name.partition(".")[0] in ("", *_BUILT_IN):
            return None
        return name or None


def read_header(reader: TextReader, begun: str) -> Reading[Header | None]:
    """Read a header up to ``<|message|>``; None where the text goes on with something else.

    ``begun``: what was read of it, one of `BEGINS` or `RECIPIENT`.
    """
    channel = recipient = ""
    before = begun.removeprefix(" ").removesuffix("=")
    expects_recipient = begun == RECIPIENT
    for _ in range(_MAX_PARTS):
        yield from reader.skip()
        part = yield from reader.accept("<|message|>", "<|channel|>", "<|constrain|>", "=")
        if part == "<|message|>":
            return Header(channel, recipient)
        if part == "=":
            if before != "to":
                return None
            expects_recipient = True
            continue
        part = part or (yield from reader.name())
        if not part:
            return None
        if expects_recipient:
            recipient = part
        elif before == "<|channel|>":
            channel = part
        before, expects_recipient = part, False
    return None
