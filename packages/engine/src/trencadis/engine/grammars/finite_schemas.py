"""Whether a JSON schema accepts any finite value: one that requires itself within itself does not.

llguidance compiles such a schema, and each answer would be cut at ``max_tokens``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote


def accepts_finite(schema: Any) -> bool:
    """Whether a value of finite size may match ``schema``; True where that is not known.

    The least fixed point: a schema is finite if those that it requires were found to be.
    """
    # The inner ones first, so that most are known when an outer one asks.
    left = list(_mappings(schema))[::-1]
    finite: set[int] = set()
    num_left = len(left) + 1
    while len(left) < num_left:
        num_left = len(left)
        for each in left:
            if _is_finite(each, schema, finite):
                finite.add(id(each))
        left = [each for each in left if id(each) not in finite]
    return not isinstance(schema, Mapping) or id(schema) in finite


def _mappings(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Every mapping, also those that are not schemas: a reference may name any place."""
    stack = [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, Mapping):
            yield node
            stack.extend(node.values())
        stack.extend(_listed(node))


def _is_finite(node: Mapping[str, Any], root: Any, finite: set[int]) -> bool:
    def known(inner: Any) -> bool:
        return not isinstance(inner, Mapping) or id(inner) in finite

    if "$ref" in node and not known(_target(root, node["$ref"])):
        return False
    if not all(map(known, _listed(node.get("allOf")))):
        return False
    for name in ("anyOf", "oneOf"):
        alternatives = _listed(node.get(name))
        if alternatives and not any(map(known, alternatives)):
            return False
    kinds = node.get("type", ["any"])
    kinds = [kinds] if isinstance(kinds, str) else _listed(kinds)
    if "enum" in node or "const" in node or not set(kinds) <= {"object", "array"}:
        return True
    return any(
        all(map(known, _required(node) if kind == "object" else _first_items(node)))
        for kind in kinds
    )


def _required(node: Mapping[str, Any]) -> list[Any]:
    """The schemas of the properties that an object must have."""
    properties = node.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    others = node.get("additionalProperties")
    names = (name for name in _listed(node.get("required")) if isinstance(name, str))
    return [properties.get(name, others) for name in names]


def _first_items(node: Mapping[str, Any]) -> list[Any]:
    """The schemas of the items that an array must have."""
    count = node.get("minItems", 0)
    if not isinstance(count, int) or count < 1:
        return []
    first = _listed(node.get("prefixItems"))
    return [*first[:count], *([node.get("items")] if count > len(first) else [])]


def _target(root: Any, reference: Any) -> Any:
    """What a reference within the schema names; None for another one."""
    if reference != "#" and not str(reference).startswith("#/"):
        return None
    node = root
    for part in reference[1:].split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(node, Mapping):
            node = node.get(name)
        elif isinstance(node, list) and name.isdecimal() and int(name) < len(node):
            node = node[int(name)]
        else:
            return None
    return node


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
