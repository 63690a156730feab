"""Bucket files: the buckets of both phases, written by hand or by a tool.

A line has one shape (batch, query, context blocks). Each size is an integer, a list, or a
`range(...)`; lists and ranges stand for all combinations. A query of 1 makes a decode bucket, as in
Gaudi's plugin. The lines are parsed, never evaluated.
"""

from __future__ import annotations

import ast
import itertools
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

from trencadis.bucketing.errors import BucketingError

FileShape: TypeAlias = tuple[int, int, int]

MAX_SHAPES = 1 << 20
"""Per line. Far more graphs than a server captures; a mistake such as range(1, 10**9) stays
cheap."""


def read_bucket_file(path: str | os.PathLike[str]) -> tuple[FileShape, ...]:
    """All shapes (batch, query, context blocks) of the file, sorted, each once.

    Raises:
        BucketingError: a bad line, with its number, or no shape in the file.
        OSError: the file cannot be read.
    """
    shapes: set[FileShape] = set()
    text = Path(path).read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.strip()
        if not content or content.startswith("#"):
            continue
        try:
            shapes.update(_shapes(content))
        except BucketingError as error:
            raise BucketingError(f"{path}, line {number}: {content!r} {error}") from None
    if not shapes:
        raise BucketingError(f"{path} has no buckets: add lines such as (1, [128, 256], 0)")
    return tuple(sorted(shapes))


def write_bucket_file(
    path: str | os.PathLike[str],
    products: Iterable[Sequence[Sequence[int]]],
    *,
    comment: str = "",
) -> None:
    """Write one line per product: the lists of batch, query and context sizes."""
    lines = [f"# {line}" for line in comment.splitlines()]
    for sizes in products:
        parts = (str(axis[0]) if len(axis) == 1 else str(list(axis)) for axis in sizes)
        lines.append(f"({', '.join(parts)})")
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _shapes(content: str) -> Iterable[FileShape]:
    try:
        node = ast.parse(content, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise BucketingError("is not a shape: write (batch, query, context)") from None
    if not isinstance(node, ast.Tuple) or len(node.elts) != 3:
        raise BucketingError("is not a shape of three sizes: write (batch, query, context)")
    sizes = [_sizes(element) for element in node.elts]
    if math.prod(map(len, sizes)) > MAX_SHAPES:
        raise BucketingError(f"has more than {MAX_SHAPES} buckets: write fewer")
    if any(min(axis) < least for axis, least in zip(sizes, (1, 1, 0), strict=True)):
        raise BucketingError("has a batch or query below 1, or a context below 0: raise it")
    batch, query, context = sizes
    return itertools.product(batch, query, context)


def _sizes(node: ast.expr) -> Sequence[int]:
    match node:
        case ast.List(elts=elements):
            sizes: Sequence[int] = [_integer(element) for element in elements]
        case ast.Call(func=ast.Name(id="range"), args=bounds, keywords=[]) if 1 <= len(bounds) <= 3:
            sizes = _range([_integer(bound) for bound in bounds])
        case _:
            sizes = [_integer(node)]
    if not sizes:
        raise BucketingError("has a list or range without sizes: give at least one")
    return sizes


def _range(bounds: Sequence[int]) -> range:
    if len(bounds) == 3 and bounds[2] == 0:
        raise BucketingError("has a range of step 0: give another step")
    sizes = range(*bounds)
    # len() of a huge range raises OverflowError; a slice does not.
    if sizes[MAX_SHAPES : MAX_SHAPES + 1]:
        raise BucketingError(f"has a range of more than {MAX_SHAPES} sizes: write fewer")
    return sizes


def _integer(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)) if type(value) is int:
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(value))):
            return -value
        case _:
            raise BucketingError(
                "has a size that is not an integer, a list or a range: write one of these"
            )
