"""A field of a request is declared once for the engine and once for the API."""

from __future__ import annotations

import ast
from pathlib import Path

import attrs
import pytest

from trencadis.engine import GenerateRequest

ROOT = Path(__file__).parent.parent
MOST_SITES = 5


def declaration_sites(source: str, field: str) -> list[int]:
    """The lines that declare a field or pass it on.

    Parameters of that name, fields of classes, and arguments of calls that are the field and
    nothing else.
    """
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.arg) and node.arg == field:
            lines.append(node.lineno)
        elif isinstance(node, ast.ClassDef):
            lines += [each.lineno for each in node.body if _is_field(each, field)]
        elif isinstance(node, ast.Call):
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
            lines += [each.lineno for each in arguments if _is_the_field(each, field)]
    return sorted(lines)


def _is_field(node: ast.stmt, field: str) -> bool:
    return (
        isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and node.target.id == field
    )


def _is_the_field(node: ast.expr, field: str) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
    return name == field


OF_OTHERS = {
    *("prompt_token_ids", "output_token_ids", "params", "request_id", "model"),
    "client",  # of the scheduler's requests, and of fair shares
}
"""Names that other values have, too, so that their sites are not those of the field alone."""


@pytest.mark.parametrize("field", sorted(attrs.fields_dict(GenerateRequest).keys() - OF_OTHERS))
def test_a_field_of_a_request_is_declared_at_few_sites(field: str) -> None:
    sites = {
        f"{path.relative_to(ROOT)}:{line}"
        for package in ("engine", "server")
        for path in (ROOT / "packages" / package / "src").rglob("*.py")
        for line in declaration_sites(path.read_text(), field)
    }
    remedy = f"more than {MOST_SITES} lines declare or pass on {field}: pass on the request instead"
    assert 0 < len(sites) <= MOST_SITES, "\n".join((remedy, *sorted(sites)))


def test_parameters_fields_and_arguments_count() -> None:
    source = """
class Request:
    salt: str
    other: str = salt

async def add(key, *, salt=None):
    check(salt)
    send(key, salt=key.salt)
    return (key.salt,), salt is None
"""
    assert declaration_sites(source, "salt") == [3, 6, 7, 8]
