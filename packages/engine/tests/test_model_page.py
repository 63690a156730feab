"""``docs/models.md`` says of each family what happens when a tiny model of it is served.

``TRENCADIS_WRITE_MODELS=1 pytest packages/engine/tests/test_model_page.py -m 'slow or not slow'``
writes what happens on the device of the session: run it without ``TRENCADIS_TEST_DEVICE``, and with
``hpu-lazy``; ``hpu-eager`` has the same outcomes and is to find them so. Otherwise an outcome that
differs is a failure. The page's table has the lines of rejections and their short names; a line
that it lacks becomes an outcome as a whole. The default session on the CPU serves a sample and
rejects all that are rejected; the slow tests, and those on a stand-in, serve all.
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
COLUMN = 1 if "TRENCADIS_TEST_DEVICE" in os.environ else 0
WRITES = "TRENCADIS_WRITE_MODELS" in os.environ
SERVES = "serves"
SAMPLE = (
    "DeepSeek V3",
    "Llama 4 (text), within a chunk",
    "Mixtral",
    "Mistral v0.1, within its window",
)

PROMPTS = ([1, 2, 3], list(range(40, 80)), [*range(90, 112), 7])
"""The second is longer than a window, and than a step takes at once; the third reaches a window's
end while it is decoded."""

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


LAYERS = "the model cannot be served, because "
PLACEHOLDERS = {"N": r"[\d.]+", "BACKEND": r"\w+ \(\w+\)", "NAME": r"\w+"}
HEAD = "| reason | line"
"""How the page's table begins."""

LIST = "writes and checks this list:\n\n"
"""The end of the sentence before the list."""

ENTRY = re.compile(r"- (.+) on the CPU, (.+) on Gaudi: (.+)")


def reasons() -> dict[str, str]:
    """The lines of rejections by their short names."""
    lines = PAGE.read_text().partition(HEAD)[2].partition("\n\n")[0].splitlines()[2:]
    rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return dict(rows)


REASONS = {
    name: re.compile(
        f"({LAYERS})?"
        + "".join(PLACEHOLDERS.get(part, re.escape(part)) for part in re.split(r"\b", line))
    )
    for name, line in reasons().items()
}


def listed() -> dict[str, list[str]]:
    """What the page says of each family: on the CPU, and on the stand-in for a Gaudi."""
    found: dict[str, list[str]] = {}
    for line in PAGE.read_text().partition(LIST)[2].splitlines():
        entry = ENTRY.fullmatch(line)
        assert entry is not None, line
        for family in entry[3].split("; "):
            assert family not in found, family
            found[family] = [entry[1], entry[2]]
    return found


def write(family: str, cell: str) -> None:
    outcomes = listed()
    outcomes.setdefault(family, ["untried", "untried"])[COLUMN] = cell
    PAGE.write_text(PAGE.read_text().partition(LIST)[0] + LIST + page_list(outcomes))


def page_list(outcomes: dict[str, list[str]]) -> str:
    """The families with each pair of outcomes in a line."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for family in FAMILIES:
        if family in outcomes:
            groups.setdefault(tuple(outcomes[family]), []).append(family)
    lines = (
        f"- {cpu} on the CPU, {hpu} on Gaudi: {'; '.join(names)}\n"
        for (cpu, hpu), names in groups.items()
    )
    return "".join(lines)


def outcome(directory: Path) -> str:
    """`SERVES` where the tokens are those of transformers, else the reason of the rejection.

    The reason is its short name, or the whole line of the error where it has none.
    """
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
        line = str(error).replace(str(directory), "the model")
        return next((name for name, form in REASONS.items() if form.fullmatch(line)), line)
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
            if COLUMN == 0 and name not in SAMPLE and listed().get(name, [""])[0] == SERVES
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
    assert listed()[family][COLUMN] == cell, "see this module's docstring for how to write the page"


def test_the_page_has_no_other_family_and_no_other_reason() -> None:
    outcomes = listed()
    assert set(outcomes) == set(FAMILIES)
    assert {cell for pair in outcomes.values() for cell in pair} == {SERVES, *REASONS}
    assert PAGE.read_text().endswith(LIST + page_list(outcomes))
