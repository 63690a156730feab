"""Bucket files: the syntax of a line, and that no line is evaluated."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.bucketing import BucketingError, read_bucket_file, write_bucket_file


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
    assert read_bucket_file(path) == (
        *((1, 256, context) for context in (0, 4, 8)),
        *((1, 512, context) for context in (0, 4, 8)),
        (1, 2048, 0),
        *((32, 1, blocks) for blocks in (128, 256, 384, 512)),
        (64, 1, 1024),
    )


sizes = st.lists(st.integers(1, 9999), min_size=1, max_size=4, unique=True).map(sorted)


@given(st.lists(st.tuples(sizes, sizes, sizes), min_size=1, max_size=3))
def test_a_written_file_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, products: list[tuple[list[int], ...]]
) -> None:
    path = tmp_path_factory.mktemp("files") / "buckets.txt"
    write_bucket_file(path, products, comment="two\nlines")
    assert path.read_text().startswith("# two\n# lines\n(")
    expected = {(a, b, c) for x, y, z in products for a in x for b in y for c in z}
    assert read_bucket_file(path) == tuple(sorted(expected))


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
    ],
)
def test_a_bad_line_is_an_error_with_its_number(tmp_path: Path, line: str, message: str) -> None:
    path = written(tmp_path, f"# one\n(1, 128, 0)\n{line}\n(2, 128, 0)\n")
    with pytest.raises(BucketingError, match=f"line 3: .*{message}"):
        read_bucket_file(path)


def test_a_file_without_buckets_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BucketingError, match="has no buckets: add lines"):
        read_bucket_file(written(tmp_path, "# nothing\n"))
