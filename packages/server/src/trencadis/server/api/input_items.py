"""The input of a stored response as a list of items: OpenAI's ``ResponseItemList``.

The store keeps items without ids. Those of the list follow from the id of the response and the
position of the item, so that a client can ask for the rest of a list.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel

from trencadis.engine import InvalidRequest
from trencadis.server.api.responses import InputItem

MAX_LISTED = 100
"""Most items of one list, as in the OpenAI API."""

_ID_PREFIXES = {"message": "msg", "reasoning": "rs"}
"""The beginning of ids, where it is not ``fc``."""


class ResponseItemList(BaseModel):
    """A part of the items. ``has_more``: whether more follow the last one."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


def input_items(response_id: str, conversation: bytes, num_output: int) -> list[dict[str, Any]]:
    """The items of a stored conversation, without the ``num_output`` last ones, the answer."""
    stored = json.loads(conversation)
    name = response_id.removeprefix("resp_")
    return [
        _listed(InputItem.model_validate(item), f"{name}_{position}")
        for position, item in enumerate(stored[: len(stored) - num_output])
    ]


def page(
    items: Sequence[dict[str, Any]], *, after: str | None, limit: int, order: Literal["asc", "desc"]
) -> ResponseItemList:
    """The first ``limit`` items, or those that follow the one with the id ``after``.

    Raises `InvalidRequest` where there is no such item.
    """
    ordered = list(items) if order == "asc" else list(reversed(items))
    begin = 0
    if after is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise InvalidRequest(f"{after!r} is not an item of this response", "after")
        begin = ids.index(after) + 1
    listed = ordered[begin : begin + limit]
    return ResponseItemList(
        data=listed,
        first_id=listed[0]["id"] if listed else None,
        last_id=listed[-1]["id"] if listed else None,
        has_more=begin + limit < len(ordered),
    )


def _listed(item: InputItem, name: str) -> dict[str, Any]:
    head = {
        "id": f"{_ID_PREFIXES.get(item.type, 'fc')}_{name}",
        "type": item.type,
        "status": "completed",
    }
    if item.type == "function_call":
        return {**head, "call_id": item.call_id, "name": item.name, "arguments": item.arguments}
    if item.type == "function_call_output":
        return {**head, "call_id": item.call_id, "output": item.output}
    if item.type == "reasoning":
        summary = [{"type": "summary_text", "text": item.summary}] if item.summary else []
        content = [{"type": "reasoning_text", "text": item.content}] if item.content else []
        return {**head, "summary": summary, "content": content}
    part: dict[str, Any] = {"type": "input_text", "text": item.content}
    if item.role == "assistant":
        part = {"type": "output_text", "text": item.content, "annotations": []}
    return {**head, "role": item.role, "content": [part]}
