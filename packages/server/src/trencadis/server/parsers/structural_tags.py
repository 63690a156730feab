"""vLLM's structural tags: text in which a trigger begins a tag, whose JSON has a schema.

As in "I call <function=sum>{"a": 1}</function>.", with the trigger ``<function=``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from trencadis.engine import InvalidRequest
from trencadis.server.parsers.closed_schemas import closed
from trencadis.server.parsers.forced_calls import escaped, json_form, quoted


@attrs.frozen
class StructuralTag:
    """``begin``, JSON that ``schema`` accepts (None: any), and ``end``."""

    begin: str
    schema: Mapping[str, Any] | None
    end: str


def tagged_text(tags: Sequence[StructuralTag], triggers: Sequence[str]) -> str:
    """A grammar for texts in which a tag follows each trigger, with which its ``begin`` begins.

    Raises `InvalidRequest` for a tag without a trigger, and a trigger without a tag.
    """
    following: dict[str, list[str]] = {trigger: [] for trigger in triggers}
    for tag in tags:
        trigger = next((each for each in triggers if tag.begin.startswith(each)), None)
        if trigger is None:
            raise InvalidRequest(f"no trigger begins {tag.begin!r}: give one that does")
        rest = quoted(tag.begin.removeprefix(trigger))
        schema = json_form(closed({} if tag.schema is None else tag.schema))
        following[trigger].append(f"{rest} %json {schema} {quoted(tag.end)}")
    unused = [trigger for trigger, rules in following.items() if not rules]
    if unused or not triggers:
        raise InvalidRequest(f"no tag begins with {unused[0]!r}" if unused else "needs triggers")
    rules = []
    for number, (trigger, bodies) in enumerate(following.items()):
        rules.append(rf"trigger_{number}[lazy]: /(.|\n)*{escaped(trigger)}/")
        names = [f"tag_{number}_{index}" for index in range(len(bodies))]
        rules.append(f"tag_{number}: trigger_{number} ({' | '.join(names)})")
        rules += [f"{name}: {body}" for name, body in zip(names, bodies, strict=True)]
    choice = " | ".join(f"tag_{number}" for number in range(len(following)))
    return "\n".join([f"start: ({choice})* text", r"text: /(.|\n)*/", *rules])
