"""Lays out the documentation as a site that mkdocs builds: ``python tools/documentation.py DIR``.

The pages are the repository's Markdown files in the repository's folders, so that a relative link
is right in both. Their order is that of `SECTIONS`; a page that is in no earlier section is in the
last one, so that none is left out.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = ("*.md", "*.png", "deploy/*", "examples/*")
SECTIONS = {
    "Start": ("README.md", "docs/models.md", "docs/gaudi.md", "docs/performance.md", "deploy/*"),
    **{
        name: (f"packages/{name}/README.md", f"docs/{name}/*", f"packages/{name}/*")
        for name in sorted(path.name for path in ROOT.glob("packages/*"))
    },
    "In other runtimes": ("docs/runtimes/*",),
    "Inside": ("docs/architecture.md", "docs/decisions/*", "docs/*", "*"),
}
"""Patterns of pages by title of the section. ``*`` also stands for folders."""


def navigation(pages: Sequence[str]) -> list[dict[str, list[str]]]:
    """Every page once, in the first section that has it."""
    left, sections = sorted(pages), []
    for title, patterns in SECTIONS.items():
        section: list[str] = []
        for pattern in patterns:
            section += fnmatch.filter(left, pattern)
            left = [page for page in left if page not in section]
        if section:
            sections.append({title: section})
    return sections


def lay_out(directory: Path) -> None:
    """Copy the files of the site, and write the configuration of mkdocs beside them."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *FILES]
    listed = subprocess.run(  # noqa: S603 - only git
        command, cwd=ROOT, check=True, capture_output=True, text=True
    )
    files = sorted(file for file in listed.stdout.splitlines() if (ROOT / file).exists())
    pages = directory / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    for file in files:
        (pages / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, pages / file)
    config = {
        "site_name": "Trencadís",
        "docs_dir": "pages",
        "site_dir": "html",
        "nav": navigation(fnmatch.filter(files, "*.md")),
        "theme": {"name": "material", "font": False, "features": ["navigation.indexes"]},
        "plugins": ["search"],
        "markdown_extensions": ["tables", {"toc": {"permalink": True}}, "pymdownx.superfences"],
        "strict": True,
        "validation": {
            "nav": dict.fromkeys(("omitted_files", "not_found", "absolute_links"), "warn"),
            "links": dict.fromkeys(
                ("not_found", "anchors", "absolute_links", "unrecognized_links"), "warn"
            ),
        },
    }
    # Every JSON text is YAML.
    (directory / "mkdocs.yml").write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Lays out the documents as a site for mkdocs")
    parser.add_argument("directory", type=Path)
    lay_out(parser.parse_args().directory)
