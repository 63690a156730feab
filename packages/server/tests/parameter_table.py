"""What a test expects of every parameter that a method of a client library knows.

The parameters come from the method's signature, so that one that a new version of the library adds
has no entry, and fails its test until somebody decides what the server does with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import pytest


@attrs.define
class Method:
    """A method of a client that asks the model, with arguments of its own.

    ``texts``: the answers in what it returns. ``bad_request``: the client's error for status 400.
    ``sent``: the names of all arguments that a test has passed.
    """

    create: Callable[..., Any]
    texts_of: Callable[[Any], list[str]]
    bad_request: type[Exception]
    defaults: Mapping[str, Any]
    sent: set[str] = attrs.field(factory=set)

    def __call__(self, **fields: Any) -> Any:
        self.sent |= fields.keys()
        return self.create(**{**self.defaults, **fields})

    def texts(self, **fields: Any) -> list[str]:
        """The texts of the choices."""
        return self.texts_of(self(**fields))

    def text(self, **fields: Any) -> str:
        """The text of the first choice."""
        return self.texts(**fields)[0]


@attrs.frozen
class ParameterTable:
    """``effects``: for each name a check of what the parameter does. ``ignored``: a value that
    changes no answer. ``refused``: a value that gets status 400 with the name in it."""

    effects: Mapping[str, Callable[[Method], None]]
    ignored: Mapping[str, Any]
    refused: Mapping[str, Any]

    def check(self, name: str, method: Method) -> None:
        """Check all that is expected of one parameter, which is something."""
        assert name in {*self.effects, *self.ignored, *self.refused}, (
            f"{name} is a parameter of the client, and no test says what the server does with it"
        )
        if name in self.effects:
            self.effects[name](method)
            assert name in method.sent, f"the check of {name} never sends it"
        if name in self.ignored:
            assert method.texts(**{name: self.ignored[name]}) == method.texts()
        if name in self.refused:
            with pytest.raises(method.bad_request) as caught:
                method(**{name: self.refused[name]})
            error = caught.value.body.get("error", caught.value.body)  # the form of each API
            param = error["param"]
            assert param.partition(".")[0].partition("[")[0] == name, error

    def check_names(self, known: list[str]) -> None:
        """Check that the table has no name that the client does not know."""
        named = {*self.effects, *self.ignored, *self.refused}
        assert named == set(known)


def parameters_of(create: Callable[..., Any]) -> list[str]:
    """The names of all parameters of a method of a class."""
    return [name for name in inspect.signature(create).parameters if name != "self"]
