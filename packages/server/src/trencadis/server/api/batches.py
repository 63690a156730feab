"""Bodies and lists of OpenAI's Files and Batch APIs. Files and batches are ``openai.types``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from openai.types import Batch, FileObject
from pydantic import BaseModel, Field, StringConstraints

from trencadis.engine import InvalidRequest

MAX_LISTED_BATCHES = 100
MAX_LISTED_FILES = 10_000
"""Most of one list, as in the OpenAI API."""


class BatchRequest(BaseModel):
    """What a new batch runs."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: (
        Annotated[
            dict[
                Annotated[str, StringConstraints(max_length=64)],
                Annotated[str, StringConstraints(max_length=512)],
            ],
            Field(max_length=16),
        ]
        | None
    ) = None
    output_expires_after: dict[str, Any] | None = None


def page(
    items: Sequence[FileObject] | Sequence[Batch], after: str | None, limit: int
) -> dict[str, Any]:
    """The first ``limit`` items, or those that follow the one with the id ``after``.

    Raises `InvalidRequest` where there is no such item.
    """
    ids = [item.id for item in items]
    if after is not None and after not in ids:
        raise InvalidRequest(f"{after[:100]!r} is none of this list", "after")
    begin = 0 if after is None else ids.index(after) + 1
    listed = items[begin : begin + limit]
    return {
        "object": "list",
        "data": [item.model_dump(mode="json") for item in listed],
        "first_id": listed[0].id if listed else None,
        "last_id": listed[-1].id if listed else None,
        "has_more": begin + limit < len(items),
    }
