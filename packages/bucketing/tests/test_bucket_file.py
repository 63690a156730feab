"""Bucket files: the syntax of a line, and that no line is evaluated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.bucketing import (
    Bucket,
    BucketingError,
    ListedBuckets,
    bucket_file,
    read_bucket_file,
    write_bucket_file,
)


def written(folder: Path, text: str) -> Path:
    path = folder / "buckets.txt"
    path.write_text(text)
    return path


def test_the_plugins_sample_file(tmp_path: Path) -> None:
    # The lines of vllm_gaudi/extension/bucketing/bucketing_file.txt, and a range.
    path = written(
        tmp_path,
        "# Prompt: (batch_size, query_len, context)\n"
        "\n"
        "(1, 2048, 0)\n"
        "(1, [256, 512], [0, 4, 8])\n"
        "(64, 1, 1024)\n"
        "(32, 1, range(128, 513, 128))  # decode\n",
    )
    listed = read_bucket_file(path)
    assert listed.prompt == (
        *((1, 256, context) for context in (0, 4, 8)),
        *((1, 512, context) for context in (0, 4, 8)),
        (1, 2048, 0),
    )
    assert listed.decode == (*((32, blocks) for blocks in (128, 256, 384, 512)), (64, 1024))


def prompt_bucket(*shape: int) -> Bucket:
    return Bucket(("batch", "query", "context_blocks"), shape)


def decode_bucket(*shape: int) -> Bucket:
    return Bucket(("batch", "blocks"), shape)


positive = st.integers(1, 12)
prompts = st.builds(prompt_bucket, positive, positive, st.integers(0, 12))
decodes = st.builds(decode_bucket, positive, positive)


@given(st.sets(prompts), st.sets(decodes, min_size=1))
def test_a_written_file_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, prompt: set[Bucket], decode: set[Bucket]
) -> None:
    # With a query of 1 too, which a line without a mark would make a decode bucket.
    path = tmp_path_factory.mktemp("files") / "buckets.txt"
    write_bucket_file(path, prompt=prompt, decode=decode, comment="two\nlines")
    assert path.read_text().startswith("# two\n# lines\n")
    assert read_bucket_file(path) == ListedBuckets(
        tuple(sorted(bucket.shape for bucket in prompt)),
        tuple(sorted(bucket.shape for bucket in decode)),
    )


def test_a_comment_may_name_a_file_whose_name_is_not_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "buckets.txt"
    write_bucket_file(path, decode=[decode_bucket(8, 128)], comment="fitted to caf\udce9.csv")
    assert path.read_bytes().startswith(rb"# fitted to caf\udce9.csv")
    assert read_bucket_file(path).decode == ((8, 128),)


def test_a_written_file_is_one_that_the_plugin_reads(tmp_path: Path) -> None:
    path = tmp_path / "buckets.txt"
    grid = [prompt_bucket(b, q, c) for b in (1, 2) for q in (1, 128, 256) for c in (0, 4)]
    write_bucket_file(path, prompt=grid, decode=[decode_bucket(8, 128)])
    assert path.read_text().splitlines() == [
        "([1, 2], [128, 256], [0, 4])",
        "prompt ([1, 2], 1, [0, 4])",
        "(8, 1, 128)",
    ]


@pytest.mark.parametrize(
    ("buckets", "message"),
    [
        ({}, "no buckets to write"),
        ({"prompt": [decode_bucket(1, 1)]}, "is not a prompt bucket of 3 sizes"),
        ({"decode": [prompt_bucket(1, 1, 1)]}, "is not a decode bucket of 2 sizes"),
        ({"prompt": [(1, 1, 1)]}, "is not a prompt bucket"),
        ({"prompt": 7}, "prompt must be of type Iterable, got 7"),
        ({"prompt": [prompt_bucket(0, 1, 1)]}, "has a size of 0"),
        ({"decode": [decode_bucket(1, 0)]}, "has a size of 0"),
    ],
)
def test_buckets_that_no_file_can_hold_are_refused_and_the_file_is_kept(
    tmp_path: Path, buckets: dict[str, Any], message: str
) -> None:
    path = written(tmp_path, "(1, 128, 0)\n")
    with pytest.raises(BucketingError, match=message):
        write_bucket_file(path, **buckets)
    assert path.read_text() == "(1, 128, 0)\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("(1, 128)", "is not a shape of three sizes"),
        ("[1, 128, 0]", "is not a shape of three sizes"),
        ("1, 128, 0, 0", "is not a shape of three sizes"),
        ("(1, 128,", "is not a shape: write"),
        ("(" * 5000, "is not a shape: write"),
        ("(1, 128.0, 0)", "a size that is not an integer"),
        ("(1, True, 0)", "a size that is not an integer"),
        ("(1, [[128]], 0)", "a size that is not an integer"),
        ("(1, __import__('os').getpid(), 0)", "a size that is not an integer"),
        ("(1, print(1), 0)", "a size that is not an integer"),
        ("(1, range(1, 2, 3, 4), 0)", "a size that is not an integer"),
        ("(1, range(128, 64), 0)", "a list or range without sizes"),
        ("(1, [], 0)", "a list or range without sizes"),
        ("(1, range(1, 9, 0), 0)", "a range of step 0"),
        ("(1, range(10**9), 0)", "a size that is not an integer"),
        ("(1, range(100000000000000000000000), 0)", "a range of more than"),
        ("(range(1, 9999), range(1, 9999), 0)", "more than 1048576 buckets"),
        ("(0, 128, 0)", "a batch or query below 1"),
        ("(1, -128, 0)", "a batch or query below 1"),
        ("(1, 128, -1)", "a context below 0"),
        ("(1, 1, 0)", r"a decode bucket \(a query of 1\) without blocks"),
        ("(1, [1, 8], [0, 4])", r"a decode bucket \(a query of 1\) without blocks"),
        ("prompts (1, 1, 0)", "is not a shape"),
        (f"(1, {10**13}, 0)", "a size above"),
        (f"(1, {'9' * 5000}, 0)", "is not a shape: write"),
    ],
)
def test_a_bad_line_is_an_error_with_its_number(tmp_path: Path, line: str, message: str) -> None:
    path = written(tmp_path, f"# one\n(1, 128, 0)\n{line}\n(2, 128, 0)\n")
    with pytest.raises(BucketingError, match=f"line 3: .*{message}"):
        read_bucket_file(path)


def test_a_file_in_another_encoding_is_an_error_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "buckets.txt"
    path.write_bytes(b"(1, 128, 0)\n# Gr\xfc\xdfe\n(1, 256, 0)\n")
    with pytest.raises(BucketingError, match=r"line 2 is not UTF-8 text \(byte 0xfc\): save"):
        read_bucket_file(path)


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    path = tmp_path / "buckets.txt"
    path.write_bytes(b"\xef\xbb\xbf(1, 128, 0)\n")
    assert read_bucket_file(path).prompt == ((1, 128, 0),)


def test_many_long_lines_are_refused_before_they_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_file, "MAX_SHAPES", 1000)
    lines = "".join(f"({batch}, range(2, 700), 0)\n" for batch in range(1, 4))
    with pytest.raises(BucketingError, match=r"line 2: .* more than 1000 buckets in all"):
        read_bucket_file(written(tmp_path, lines))


def test_as_many_buckets_as_a_file_may_have_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_file, "MAX_SHAPES", 1000)
    for lines in ("(1, range(2, 1002), 0)\n", "(1, range(2, 502), 0)\n(500, 1, range(1, 501))\n"):
        listed = read_bucket_file(written(tmp_path, lines))
        assert len(listed.prompt) + len(listed.decode) == 1000
    for line in ("(1, range(2, 1003), 0)", "([1, 2], range(2, 503), 0)"):
        with pytest.raises(BucketingError, match=r"line 1: .* more than 1000"):
            read_bucket_file(written(tmp_path, line))
    with pytest.raises(BucketingError, match=r"line 2: .* more than 1000 buckets in all"):
        read_bucket_file(written(tmp_path, lines.replace("501))", "502))")))


def test_the_smallest_and_the_largest_sizes_are_read(tmp_path: Path) -> None:
    largest = 1 << 40
    path = written(tmp_path, f"(1, 2, 0)\n(1, {largest}, {largest})\n({largest}, 1, 1)\n")
    assert read_bucket_file(path) == ListedBuckets(
        ((1, 2, 0), (1, largest, largest)), ((largest, 1),)
    )
    with pytest.raises(BucketingError, match=f"line 1: .* has a size above {largest}: lower it"):
        read_bucket_file(written(tmp_path, f"(1, {largest + 1}, 0)"))


def test_a_path_that_names_no_file_is_refused() -> None:
    for path in (None, 3, "a\0b"):
        with pytest.raises(BucketingError, match="path"):
            read_bucket_file(path)  # type: ignore[arg-type]


def test_a_file_without_buckets_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BucketingError, match="has no buckets: add lines"):
        read_bucket_file(written(tmp_path, "# nothing\n"))
