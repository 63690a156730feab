"""Keep the lists of settings in the pages of `docs/` equal to the settings classes.

``python tools/flag_lists.py --write`` writes each list between its markers, which name the class:
``<!-- flags:begin trencadis.engine.EngineConfig -->`` and ``<!-- flags:end -->``. ``--check`` (the
default) names the pages whose lists differ and ends with exit code 1 where there are any.
"""

from __future__ import annotations

import argparse
import re
import sys
from importlib import import_module
from pathlib import Path

from trencadis.engine.settings import flag_list

ROOT = Path(__file__).parent.parent
_BLOCK = re.compile(r"(<!-- flags:begin ([\w.]+) -->\n).*?(<!-- flags:end -->)", re.DOTALL)


def with_lists(text: str) -> str:
    """The text with each list made anew."""

    def block(match: re.Match[str]) -> str:
        begin, path, end = match.groups()
        module, _, name = path.rpartition(".")
        return f"{begin}\n{flag_list(getattr(import_module(module), name))}\n{end}"

    return _BLOCK.sub(block, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="change nothing (the default)")
    mode.add_argument("--write", action="store_true", help="write the lists")
    write = parser.parse_args().write
    differing = 0
    for page in sorted(ROOT.glob("docs/*/*.md")):
        text = page.read_text(encoding="utf-8")
        made = with_lists(text)
        if made != text and write:
            page.write_text(made, encoding="utf-8")
        elif made != text:
            differing += 1
            print(f"{page.relative_to(ROOT)}: run python tools/flag_lists.py --write")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
