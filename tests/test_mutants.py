"""The lists of mutations fit the code, and the tool tells a killed mutation from a survivor."""

from __future__ import annotations

import shutil
from pathlib import Path

import drawn_mutants
import mutants
import pytest
from mutants import Mutation, MutationError, is_enough, is_killed, load, load_all, table

SOURCE = "def half(number):\n    return number // 2\n"
TESTS = "from trencadis.hall.sums import half\n\n\ndef test_half():\n    assert half(4) == 2\n"


@pytest.fixture
def hall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of one module and one test."""
    directory = tmp_path / "packages" / "hall"
    source = directory / "src" / "trencadis" / "hall" / "sums.py"
    source.parent.mkdir(parents=True)
    source.write_text(SOURCE)
    tests = directory / "tests"
    tests.mkdir()
    (tests / "test_sums.py").write_text(TESTS)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    return directory


def mutation(old: str, new: str, **more: str) -> Mutation:
    return Mutation("hall", "hall", 1, "sums.py", "a wrong half", old, new, **more)


@pytest.mark.parametrize("listed", load_all(), ids=lambda listed: listed.name)
def test_each_listed_mutation_can_be_applied_to_the_code(listed: Mutation, tmp_path: Path):
    module = mutants.ROOT / "packages" / listed.package / listed.path
    copy = tmp_path / listed.path
    copy.parent.mkdir(parents=True)
    shutil.copy(module, copy)
    listed.apply(tmp_path)
    assert copy.read_text() != module.read_text()
    if listed.tests:
        assert (mutants.ROOT / "packages" / listed.package / "tests" / listed.tests).is_file()


@pytest.mark.slow
def test_a_wrong_result_is_killed_and_an_equal_one_survives(hall: Path):
    assert is_killed(mutation("// 2", "// 3"))
    assert is_killed(mutation("// 2", "// 3", tests="test_sums.py"))
    assert not is_killed(mutation("number // 2", "number >> 1"))
    assert (hall / "src/trencadis/hall/sums.py").read_text() == SOURCE


def test_a_list_that_the_code_has_outgrown_is_an_error(hall: Path, tmp_path: Path):
    with pytest.raises(MutationError, match="occurs 0 times"):
        mutation("// 9", "// 3").apply(hall)
    with pytest.raises(MutationError, match="no module"):
        Mutation("hall", "hall", 1, "gone.py", "", "a", "b").apply(hall)
    misspelt = tmp_path / "hall_more.toml"
    misspelt.write_text('[[mutation]]\nmodul = "a"\n')
    with pytest.raises(MutationError, match="modul"):
        load(misspelt)


def test_survivors_need_a_reason_and_nine_of_ten_must_be_killed():
    plain, harmless = mutation("a", "b"), mutation("a", "b", harmless="It is the same.")
    assert is_enough([(plain, True)] * 9 + [(harmless, False)])
    assert not is_enough([(plain, True)] * 9 + [(plain, False)])
    assert not is_enough([(plain, True)] * 8 + [(harmless, False)] * 2)
    assert "| hall | 2 | 1 | 1 |" in table([(plain, True), (harmless, False)])
    assert "It is the same." in table([(plain, True), (harmless, False)])


def test_tests_of_a_drawn_mutant_are_those_that_run_its_line(
    hall: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(drawn_mutants, "ROOT", mutants.ROOT)
    source = hall / "src" / "trencadis" / "hall" / "sums.py"
    source.write_text(SOURCE + "\n\nTHIRD = (\n    1,\n    3,\n)\n")
    record = {"seconds": {"a": 3.0, "b": 1.0, "c": 2.0}, "tests": {"sums.py": {"2": ["a"]}}}

    def tests_of(line: int) -> dict[str, float]:
        change = drawn_mutants.Change("sums.py", line, 0, 0, "")
        return drawn_mutants.tests_of("hall", change, record)

    assert tests_of(2) == {"a": 3.0}
    assert tests_of(7) == record["seconds"]  # run by the import: no test is known
    record["tests"]["sums.py"]["5"] = ["b"]
    assert tests_of(7) == {"b": 1.0}, "the line is a part of the statement that begins in line 5"


def test_the_quickest_tests_of_a_drawn_mutant_run_and_one_always_does():
    seconds = {"a": 3.0, "b": 1.0, "c": 2.0}
    assert list(drawn_mutants.quickest(seconds, 3.5)) == ["b", "c"]
    assert list(drawn_mutants.quickest(seconds, 0.1)) == ["b"]
