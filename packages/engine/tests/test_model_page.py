"""``docs/models.md`` says of each family what happens when a tiny model of it is served.

``TRENCADIS_WRITE_MODELS=1 pytest packages/engine/tests/test_model_page.py -m 'slow or not slow'``
writes the column of the device of the session: run it without ``TRENCADIS_TEST_DEVICE``, and with
``hpu-lazy`` and ``hpu-eager``. Otherwise a cell that differs is a failure. The default session on
the CPU serves a sample and rejects all that are rejected; the slow tests, and those on a stand-in,
serve all.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from model_families import FAMILIES, MAX_MODEL_LEN, save_family
from transformers import AutoModelForCausalLM

from trencadis.engine import LLM, ModelError, SamplingParams

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
COLUMN = (None, "hpu-lazy", "hpu-eager").index(os.environ.get("TRENCADIS_TEST_DEVICE"))
WRITES = "TRENCADIS_WRITE_MODELS" in os.environ
SERVES = "serves"
SAMPLE = (
    "DeepSeek V3",
    "Llama 4 (text), within a chunk",
    "Mixtral",
    "Mistral v0.1, within its window",
)

PROMPTS = ([1, 2, 3], list(range(40, 80)), [7] * 9)
"""The second is longer than a window, and than a step takes at once."""

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


def cells(family: str) -> list[str]:
    """What the page says of a family: on the CPU, and on both modes of the stand-in."""
    row = re.search(rf"^\| {re.escape(family)} \|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    return [cell.strip() for cell in row[1].split("|")] if row else ["", "", ""]


def write(family: str, cell: str) -> None:
    before = PAGE.read_text()
    found = cells(family)
    found[COLUMN] = cell
    rows = dict(re.findall(r"^\| (.*?) \|(.*)\|$", before.partition("| --- |")[2], re.MULTILINE))
    rows[family] = f" {' | '.join(found)} "
    table = "\n".join(f"| {name} |{rows[name]}|" for name in FAMILIES if name in rows)
    head = before[: before.index("| --- |")]
    PAGE.write_text(f"{head}| --- | --- | --- | --- |\n{table}\n")


def outcome(directory: Path) -> str:
    """`SERVES` where the tokens are those of transformers, else the reason of the rejection."""
    try:
        llm = LLM(
            str(directory),
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=32,
            warmup="none",
            num_blocks=40,
            block_size=8,
        )
    except ModelError as error:
        assert "\n" not in str(error)
        return str(error).replace(str(directory), "the model")
    answers = [answer.completions[0].token_ids for answer in llm.generate(PROMPTS, GREEDY)]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        whole = model.generate(
            torch.tensor([prompt]),
            **{"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0},
        )
        assert list(answer) == whole[0, len(prompt) :].tolist()
    return SERVES


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(
            name,
            marks=pytest.mark.slow
            if COLUMN == 0 and name not in SAMPLE and cells(name)[0] == SERVES
            else (),
        )
        for name in FAMILIES
    ],
)
def test_the_page_says_what_happens(family: str, tmp_path: Path, add_tokenizer: object) -> None:
    add_tokenizer(save_family(family, tmp_path))
    cell = outcome(tmp_path)
    if WRITES:
        write(family, cell)
    assert cells(family)[COLUMN] == cell, "see this module's docstring for how to write the page"


def test_the_page_has_no_other_family() -> None:
    rows = re.findall(r"^\| (.*?) \|", PAGE.read_text().partition("| --- |")[2], re.MULTILINE)
    assert rows == list(FAMILIES)
