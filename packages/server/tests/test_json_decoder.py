"""The decoder with pauses decodes what ``json.loads`` decodes, and rejects what that rejects."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.engine import InvalidRequest
from trencadis.server.http.json_decoder import MAX_VALUES, decoded


def no_pause():
    pass


def outcome(decode, body):
    """The value as text, so that 1, 1.0 and NaN differ; or where it is wrong."""
    try:
        return repr(decode(body))
    except json.JSONDecodeError as error:
        return error.pos
    except UnicodeDecodeError:
        return "not a text"


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(
    SCALARS | st.lists(st.integers(-5, 10**20), max_size=20),
    lambda parts: st.lists(parts) | st.dictionaries(st.text(), parts),
)
SPACES = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " :\t")])


@given(VALUES, SPACES, st.booleans(), st.sampled_from(["utf-8", "utf-16", "utf-32"]))
def test_what_json_loads_decodes(value, separators, escapes, encoding):
    text = json.dumps(value, separators=separators, ensure_ascii=escapes)
    body = text.encode(encoding, "surrogatepass")
    assert outcome(lambda body: decoded(body, no_pause), body) == outcome(json.loads, body)


@given(
    VALUES,
    st.integers(0, 200),
    st.integers(0, 3),
    st.text(alphabet='[]{},:"\\ 019.-eNtrue\u0661', max_size=3),
)
def test_what_json_loads_rejects(value, start, length, inserted):
    text = json.dumps(value)
    body = (text[:start] + inserted + text[start + length :]).encode()
    assert outcome(lambda body: decoded(body, no_pause), body) == outcome(json.loads, body)


@pytest.mark.parametrize(
    "body", [b"", b"[1,]", b"[01,2]", b"[1,2", b"[1,2,", b"[,1]", b'{"a":1,}', b"[-,1]", b"[1.,2]"]
)
def test_malformed_lists_and_objects(body):
    with pytest.raises(json.JSONDecodeError):
        decoded(body, no_pause)


def test_numbers_keep_their_types_and_digits():
    text = f"[1,2.0,3,{10**30},-4,1e3,5,NaN,Infinity,6]"
    values = decoded(text.encode(), no_pause)
    assert repr(values) == repr(json.loads(text))
    assert math.isnan(values[7])


@pytest.mark.parametrize(
    "part", [b"[]", b"{}", b'""', b"1.5", b"null"], ids=["lists", "objects", "texts", "floats", ""]
)
def test_more_values_than_the_limit_are_an_error(part):
    def body(count):
        return b"[" + b",".join([part] * count) + b"]"

    assert len(decoded(body(MAX_VALUES - 1), no_pause)) == MAX_VALUES - 1
    with pytest.raises(InvalidRequest, match=f"more than {MAX_VALUES} values"):
        decoded(body(MAX_VALUES), no_pause)


def test_token_ids_do_not_count_and_have_pauses():
    pauses = []
    body = json.dumps([list(range(MAX_VALUES))] * 2).encode()
    assert [len(each) for each in decoded(body, lambda: pauses.append(1))] == [MAX_VALUES] * 2
    assert len(pauses) >= 2 * MAX_VALUES / 4096


def test_keys_and_other_values_have_pauses():
    pauses = []
    body = {str(number): [0.5, str(number)] for number in range(3000)}
    assert decoded(json.dumps(body).encode(), lambda: pauses.append(1)) == body
    assert len(pauses) >= 9000 / 512


def test_what_is_nested_too_deep_is_an_error():
    with pytest.raises(RecursionError):
        decoded(b"[" * 100_000, no_pause)
