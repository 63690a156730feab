"""``/docs``: the API description as a page that needs no other host and no script."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from fastapi import APIRouter, Request, Response

_STYLE = """
body { font-family: sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em }
table { border-collapse: collapse }
td, th { border: 1px solid #bbb; padding: .3em; text-align: left }
code { background: #eee }
"""
_RANGES = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
    "minLength": "length at least",
    "maxLength": "length at most",
}


def docs_router() -> APIRouter:
    """The route of the page."""
    router = APIRouter()

    @router.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        page = "\n".join(_page(request.app.openapi()))
        policy = "default-src 'none'; style-src 'unsafe-inline'"
        headers = {"Content-Security-Policy": policy}
        return Response(page, media_type="text/html", headers=headers)

    return router


def _page(description: dict[str, Any]) -> Iterator[str]:
    title = escape(f"{description['info']['title']} {description['info']['version']}")
    yield f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{title}</title>"
    yield f"<style>{_STYLE}</style></head><body><h1>{title}</h1>"
    yield "<p>The same for code: <a href='openapi.json'>openapi.json</a></p>"
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            yield f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
            yield f"<p>{escape(operation.get('description', ''))}</p>"
            statuses = sorted(status for status in operation["responses"] if status != "default")
            yield f"<p>Status: {', '.join(map(escape, statuses))}</p>"
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            if "properties" in body.get("schema", {}):  # others refer to a table below
                yield from _table(body["schema"]["title"], body["schema"])
    for name, schema in description.get("components", {}).get("schemas", {}).items():
        if "properties" in schema:
            yield from _table(name, schema)
    yield "</body></html>"


def _table(name: str, schema: dict[str, Any]) -> Iterator[str]:
    yield f"<h2>{escape(name)}</h2><p>{escape(schema.get('description', ''))}</p>"
    yield "<table><tr><th>field</th><th>type</th><th>range</th><th>meaning</th></tr>"
    required = schema.get("required", ())
    for field, form in schema["properties"].items():
        kinds = form.get("anyOf", [form])
        cells = (
            f"<code>{escape(field)}</code>{' (required)' if field in required else ''}",
            escape(" or ".join(filter(None, map(_kind, kinds)))),
            escape(", ".join(filter(None, map(_range, kinds)))),
            escape(form.get("description", "")),
        )
        yield f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
    yield "</table>"


def _kind(form: dict[str, Any]) -> str:
    if "enum" in form:
        return " or ".join(map(str, form["enum"]))
    if "items" in form:
        return f"list of {_kind(form['items'])}"
    return str(form.get("const", form.get("type", form.get("$ref", "").rpartition("/")[2])))


def _range(form: dict[str, Any]) -> str:
    return ", ".join(f"{word} {form[key]}" for key, word in _RANGES.items() if key in form)
