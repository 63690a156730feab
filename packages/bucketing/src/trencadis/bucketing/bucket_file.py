"""Bucket files: the buckets of both phases, written by hand, by a tool, or from a grid.

A line has one shape (batch, query, context blocks). Each size is an integer, a list, or a
`range(...)`; lists and ranges stand for all combinations. A query of 1 makes a decode bucket, as in
Gaudi's plugin, and the third size is then the number of blocks. A line that begins with `prompt` is
a prompt bucket whatever its query is; it is written only for a query of 1, so that files without it
are files of the plugin too. The lines are parsed, never evaluated.
"""

from __future__ import annotations

import ast
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import attrs

from trencadis.bucketing.errors import BucketingError, shown
from trencadis.bucketing.grid import Bucket, Shape
from trencadis.bucketing.shapes import MAX_SIZE
from trencadis.bucketing.text_files import check_path, read_text
from trencadis.bucketing.validators import instance_of

FileShape: TypeAlias = tuple[int, int, int]
"""A line's shape: (batch, query, context blocks), or (batch, 1, blocks) for decodes."""

MAX_SHAPES = 1 << 20
"""Of a file. Far more graphs than a server captures; a mistake such as range(1, 10**9) stays
cheap."""

PROMPT = "prompt"
"""The word before a prompt bucket whose query is 1."""


@attrs.frozen
class ListedBuckets:
    """The buckets of a bucket file, by phase, each sorted and without repetition.

    Attributes:
        prompt: shapes (batch, query, context blocks).
        decode: shapes (batch, blocks).
    """

    prompt: tuple[tuple[int, int, int], ...]
    decode: tuple[tuple[int, int], ...]


def read_bucket_file(path: str | os.PathLike[str]) -> ListedBuckets:
    """The buckets that the file lists.

    Raises:
        BucketingError: a bad line, with its number, or no bucket in the file.
        OSError: the file cannot be read.
    """
    prompt: set[tuple[int, int, int]] = set()
    decode: set[tuple[int, int]] = set()
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        content = line.strip()
        if not content or content.startswith("#"):
            continue
        try:
            is_prompt, shapes = _read_line(content)
            for batch, query, third in shapes:
                if is_prompt or query != 1:
                    prompt.add((batch, query, third))
                else:
                    decode.add((batch, third))
            if len(prompt) + len(decode) > MAX_SHAPES:
                raise BucketingError(f"makes more than {MAX_SHAPES} buckets in all: write fewer")
        except BucketingError as error:
            raise BucketingError(f"{path}, line {number}: {shown(content)} {error}") from None
    if not prompt and not decode:
        raise BucketingError(f"{path} has no buckets: add lines such as (1, [128, 256], 0)")
    return ListedBuckets(tuple(sorted(prompt)), tuple(sorted(decode)))


def write_bucket_file(
    path: str | os.PathLike[str],
    *,
    prompt: Iterable[Bucket] = (),
    decode: Iterable[Bucket] = (),
    comment: str = "",
) -> None:
    """Write buckets, such as those of two grids. `read_bucket_file` reads the same ones.

    Args:
        path: the file; it is replaced.
        prompt: buckets with three sizes (batch, query, context blocks), such as a `prompt_grid`.
        decode: buckets with two sizes (batch, blocks), such as a `decode_grid`.
        comment: lines to begin with.

    Raises:
        BucketingError: no buckets, or some with other axes or an impossible size.
        OSError: the file cannot be written.
    """
    check_path(path)
    instance_of(str).checked("comment", comment)
    prompts = _checked_shapes("prompt", prompt, 3)
    decodes = [(batch, 1, blocks) for batch, blocks in _checked_shapes("decode", decode, 2)]
    if not prompts and not decodes:
        raise BucketingError(f"no buckets to write to {path}: give a grid")
    lines = [f"# {line}" for line in comment.splitlines()]
    lines += _lines([shape for shape in prompts if shape[1] != 1])
    lines += [f"{PROMPT} {line}" for line in _lines([s for s in prompts if s[1] == 1])]
    lines += _lines(decodes)
    text = "\n".join(lines) + "\n"
    # A comment may name a file whose name is not UTF-8.
    Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")


def _checked_shapes(phase: str, buckets: Iterable[Bucket], num_axes: int) -> list[Shape]:
    instance_of(Iterable).checked(phase, buckets)
    shapes: list[Shape] = []
    for bucket in buckets:
        if not isinstance(bucket, Bucket) or len(bucket.shape) != num_axes:
            raise BucketingError(
                f"{shown(bucket)} is not a {phase} bucket of {num_axes} sizes: give the buckets of "
                f"a {phase} grid"
            )
        # The last size is the context or the blocks; only a context may be 0.
        if min(bucket.shape[:2]) < 1:
            raise BucketingError(
                f"{bucket} has a size of 0, which no {phase} batch has: leave it out"
            )
        shapes.append(bucket.shape)
    return shapes


def _lines(shapes: Iterable[Shape]) -> list[str]:
    """Lines that list exactly these shapes: shapes that differ along an axis share a line."""
    products: list[list[Shape]] = [[(size,) for size in shape] for shape in sorted(set(shapes))]
    # Queries first: they are the longest axis.
    for axis in (1, 2, 0):
        merged: dict[tuple[Shape, ...], Shape] = {}
        for product in products:
            others = (*product[:axis], *product[axis + 1 :])
            merged[others] = (*merged.get(others, ()), *product[axis])
        products = [
            [*others[:axis], tuple(sorted(sizes)), *others[axis:]]
            for others, sizes in merged.items()
        ]
    return [f"({', '.join(map(_written, product))})" for product in sorted(products)]


def _written(sizes: Sequence[int]) -> str:
    return str(sizes[0]) if len(sizes) == 1 else str(list(sizes))


def _read_line(content: str) -> tuple[bool, Iterator[FileShape]]:
    """Whether the line is marked as a prompt bucket, and its shapes."""
    marked = content.startswith(PROMPT)
    text = content.removeprefix(PROMPT).strip()
    try:
        node = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise BucketingError("is not a shape: write (batch, query, context)") from None
    if not isinstance(node, ast.Tuple) or len(node.elts) != 3:
        raise BucketingError("is not a shape of three sizes: write (batch, query, context)")
    sizes = [_sizes(element) for element in node.elts]
    if math.prod(map(len, sizes)) > MAX_SHAPES:
        raise BucketingError(f"has more than {MAX_SHAPES} buckets: write fewer")
    if any(min(axis) < least for axis, least in zip(sizes, (1, 1, 0), strict=True)):
        raise BucketingError("has a batch or query below 1, or a context below 0: raise it")
    if not marked and 1 in sizes[1] and 0 in sizes[2]:
        raise BucketingError(
            f"has a decode bucket (a query of 1) without blocks: raise the blocks, or write "
            f"{PROMPT} before a prompt bucket"
        )
    if any(max(axis) > MAX_SIZE for axis in sizes):
        raise BucketingError(f"has a size above {MAX_SIZE}: lower it")
    batch, query, context = sizes
    return marked, itertools.product(batch, query, context)


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
