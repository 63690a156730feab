"""Keep the tables of settings in the READMEs equal to the settings classes.

``python tools/flag_tables.py --write`` writes each table between its markers, which name the class:
``<!-- flags:begin trencadis.engine.EngineConfig -->`` and ``<!-- flags:end -->``. ``--check`` (the
default) lists the READMEs whose tables differ and ends with exit code 1 where there are any.
"""

from __future__ import annotations

import argparse
import re
import sys
from importlib import import_module
from pathlib import Path

from trencadis.engine.settings import flag_table

ROOT = Path(__file__).parent.parent
_BLOCK = re.compile(r"(<!-- flags:begin ([\w.]+) -->\n).*?(<!-- flags:end -->)", re.DOTALL)


def with_tables(text: str) -> str:
    """The text with each table made anew."""

    def block(match: re.Match[str]) -> str:
        begin, path, end = match.groups()
        module, _, name = path.rpartition(".")
        return f"{begin}\n{flag_table(getattr(import_module(module), name))}\n{end}"

    return _BLOCK.sub(block, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="change nothing (the default)")
    mode.add_argument("--write", action="store_true", help="write the tables")
    write = parser.parse_args().write
    differing = 0
    for readme in sorted(ROOT.glob("packages/*/README.md")):
        text = readme.read_text(encoding="utf-8")
        made = with_tables(text)
        if made != text and write:
            readme.write_text(made, encoding="utf-8")
        elif made != text:
            differing += 1
            print(f"{readme.relative_to(ROOT)}: run python tools/flag_tables.py --write")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
