"""OpenAI's Files and Batch APIs: files of requests, answered in files, across restarts."""

from __future__ import annotations

import asyncio
import errno
import io
import itertools
import json
import re
import threading
import time
import tracemalloc
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from official_client import client_of
from openai.types import Batch
from server_process import ServerProcess, save_tiny_model
from stand_in_engine import StandInEngine
from switching_engine import SwitchingStandIn

from trencadis.engine import ConfigError, EngineRestarting, InvalidRequest
from trencadis.server import ServerSettings, create_app
from trencadis.server import app as app_module
from trencadis.server.api.batches import page
from trencadis.server.batches import batch_line, batch_runner, file_store
from trencadis.server.batches.file_store import AnswerFiles, BatchStore
from trencadis.server.errors import ApiError
from trencadis.server.http.multipart import FormReader
from trencadis.server.routes import batches as routes_of_batches

ENDED = ("completed", "failed", "cancelled", "expired")
CHAT = "/v1/chat/completions"


def line(number: int, url: str = CHAT, **body: Any) -> dict[str, Any]:
    body = body or {"messages": [{"role": "user", "content": f"hello {number}"}]}
    return {"custom_id": f"r{number}", "method": "POST", "url": url, "body": body}


def jsonl(*lines: Any) -> bytes:
    return b"\n".join(
        each if isinstance(each, bytes) else json.dumps(each).encode() for each in lines
    )


@pytest.fixture
def batching(serving, tmp_path):
    """``async with batching() as client``: the official client of a server with batches."""

    @asynccontextmanager
    async def start(**fields: Any):
        batch_directory = str(tmp_path / "b")
        async with serving(batch_directory=batch_directory, **fields) as url, client_of(url) as one:
            yield one

    return start


async def created(client, content: bytes, endpoint: str = CHAT, **fields: Any):
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields
    )


async def ended(client, batch_id: str):
    for _ in range(6000):
        batch = await client.batches.retrieve(batch_id)
        if batch.status in ENDED:
            return batch
        await asyncio.sleep(0.01)
    pytest.fail("the batch did not end within a minute")


async def lines_of(client, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(each) for each in (await client.files.content(file_id)).text.splitlines()]


@pytest.mark.asyncio
async def test_the_official_client_uploads_runs_polls_and_downloads(batching, engine):
    async with batching() as client:
        content = jsonl(*map(line, range(20)), line(20, messages=[]))
        file = await client.files.create(file=("../in.jsonl", content), purpose="batch")
        assert (file.filename, file.bytes, file.purpose) == ("../in.jsonl", len(content), "batch")
        assert await client.files.retrieve(file.id) == file
        assert (await client.files.content(file.id)).content == content
        batch = await client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"a": "b"}
        )
        assert batch.status == "validating"
        assert batch.expires_at == batch.created_at + 86_400
        batch = await ended(client, batch.id)
        counts = batch.request_counts
        assert (batch.status, counts.completed, counts.failed, counts.total) == (
            *("completed", 20, 1, 21),
        )
        assert batch.metadata == {"a": "b"}
        answers = await lines_of(client, batch.output_file_id)
        texts = {a["custom_id"]: a["response"]["body"]["choices"][0] for a in answers}
        assert {name: text["message"]["content"] for name, text in texts.items()} == {
            f"r{n}": f"[user]hello {n}[assistant]" for n in range(20)
        }
        (failure,) = await lines_of(client, batch.error_file_id)
        assert (failure["custom_id"], failure["response"]["status_code"]) == ("r20", 400)
        assert [each.id async for each in client.batches.list()] == [batch.id]
        purposes = {each.purpose async for each in client.files.list()}
        assert purposes == {"batch", "batch_output"}
        first = await client.files.list(limit=1, order="asc")
        assert (first.data[0].id, first.has_more) == (file.id, True)
        metrics = (await httpx.AsyncClient().get(f"{str(client.base_url)[:-4]}/metrics")).text
        assert 'trencadis:batch_lines_total{engine="0",status="completed"} 20.0' in metrics
        assert 'trencadis:batches{engine="0",status="in_progress"} 0.0' in metrics
        assert (await client.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(file.id)


@pytest.mark.asyncio
async def test_each_endpoint_answers_its_lines(batching, engine):
    async with batching() as client:
        for endpoint, body in (
            ("/v1/completions", {"prompt": "b"}),
            ("/v1/responses", {"input": "c"}),
        ):
            batch = await created(client, jsonl(line(1, endpoint, **body)), endpoint)
            assert (await ended(client, batch.id)).request_counts.completed == 1
        engine.embedding_size = 4
        batch = await created(client, jsonl(line(1, "/v1/embeddings", input="a")), "/v1/embeddings")
        assert (await ended(client, batch.id)).status == "completed"
        with pytest.raises(openai.BadRequestError, match="endpoint must be one of"):
            await created(client, jsonl(line(1)), "/v1/messages")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        ([line(1), b'{"custom_id": }'], "invalid_json_line", 2),
        ([line(1), line(2), line(1)], "duplicate_custom_id", 3),
        ([line(1, "/v1/completions", prompt="a")], "invalid_url", 1),
        ([line(1) | {"method": "GET"}], "invalid_method", 1),
        ([line(1, stream=True)], "invalid_request", 1),
        ([line(1, background=True)], "invalid_request", 1),
        ([line(1) | {"body": 5}], "invalid_request", 1),
        ([line(1) | {"custom_id": None}], "missing_required_parameter", 1),
        ([line(1) | {"custom_id": "x" * 513}], "invalid_request", 1),
        ([b"{" + b'"a":{' * 5000 + b"}" * 5001], "invalid_json_line", 1),
    ],
)
async def test_a_file_with_a_bad_line_fails_before_any_is_sent(
    batching, engine, lines, code, number
):
    async with batching() as client:
        batch = await ended(client, (await created(client, jsonl(*lines))).id)
        assert batch.status == "failed"
        assert batch.errors is not None
        assert [(e.code, e.line) for e in batch.errors.data] == [(code, number)]
        assert batch.output_file_id is None
        assert engine.requests == []


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        (b"", 400, "no lines"),
        (b"hello", 400, "line 1 is not a JSON object"),
        (b'{"a": 1}\n{"b": "\0"}', 400, "line 2 is not a JSON object"),
        (b"{" + b" " * 5000 + b"}", 400, "line 1 has more than 4096 bytes"),
        (b"{}\n" * 50_001, 400, "more than 50000 lines"),
        (b"{}\n" * 70_000, 413, "larger than 200000 bytes"),
    ],
)
async def test_what_is_no_file_of_requests_is_rejected_and_not_kept(
    batching, tmp_path, monkeypatch, content, status, words
):
    monkeypatch.setattr(file_store, "MAX_FILE_BYTES", 200_000)
    async with batching(max_body_size=4096) as client:
        with pytest.raises(openai.APIStatusError, match=words) as caught:
            await client.files.create(file=("in.jsonl", content), purpose="batch")
        assert caught.value.status_code == status
        assert (await client.files.list()).data == []
        assert [path.name for path in (tmp_path / "b").iterdir()] == ["lock"]


@pytest.mark.asyncio
async def test_a_form_that_is_none_is_rejected(batching):
    async with batching() as client, httpx.AsyncClient(base_url=str(client.base_url)) as http:
        json_body = await http.post("files", json={"purpose": "batch"})
        assert json_body.status_code == 415
        for files, data, param in (
            ({"file": ("a", b"{}")}, {}, "purpose"),
            ({"file": ("a", b"{}")}, {"purpose": "vision"}, "purpose"),
            ({"other": ("a", b"{}")}, {"purpose": "batch"}, "file"),
            ({"file": ("a", b"{}")}, {"purpose": "batch", "x": "1"}, "x"),
            ({"file": ("a", b"{}")}, {"purpose": "p" * 5000}, "purpose"),
        ):
            answer = await http.post("files", files=files, data=data)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        headers = {"Content-Type": "multipart/form-data; boundary=b"}
        cut = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        for content in (cut, b"", b"--b\r\n\r\n", b"--b\r\n" + b"x" * 9000):
            answer = await http.post("files", content=content, headers=headers)
            assert answer.status_code == 400


@pytest.mark.asyncio
async def test_only_a_file_may_be_larger_than_other_bodies(batching):
    async with batching(max_body_size=4096) as client:
        with pytest.raises(openai.APIStatusError, match="4096") as caught:
            await client.chat.completions.create(
                model="stand-in", messages=[{"role": "user", "content": "x" * 9000}]
            )
        assert caught.value.status_code == 413
        assert await client.files.create(file=("in.jsonl", b"{}\n" * 3000), purpose="batch")


@pytest.mark.asyncio
async def test_a_file_that_stops_to_arrive_is_given_up(batching, tmp_path):
    part = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n{}\n'
    async with batching(body_timeout=1) as client:
        url = client.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(
            f"POST /v1/files HTTP/1.1\r\nHost: {url.host}:{url.port}\r\nContent-Length: 999\r\n"
            "Content-Type: multipart/form-data; boundary=b\r\n\r\n".encode()
            + part
        )
        answer = await asyncio.wait_for(reader.readuntil(b"}}"), 60)
        writer.close()
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"request_timeout" in answer
        assert [path.name for path in (tmp_path / "b").iterdir()] == ["lock"]


@pytest.mark.asyncio
async def test_a_file_of_the_limit_is_kept_and_one_byte_more_is_not(batching, monkeypatch):
    monkeypatch.setattr(file_store, "MAX_FILE_BYTES", 100)
    head = (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    )
    form = head + b"{}".ljust(100) + b"\r\n--b--\r\n"
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    async with batching() as client, httpx.AsyncClient(base_url=str(client.base_url)) as http:
        for content, status in (
            (form, 200),
            (form.replace(b"{}", b"{} "), 413),
            # What surrounds a file has a bound, too.
            ((b"\r\n" + form).rjust(100 + 65_536, b"x"), 200),
            ((b"\r\n" + form).rjust(100 + 65_537, b"x"), 413),
        ):
            answer = await http.post("files", content=content, headers=headers)
            assert answer.status_code == status, answer.text
            if status == 413:
                assert answer.json()["error"]["param"] == "file"
                assert answer.headers["connection"] == "close"
        assert [file.bytes for file in (await client.files.list()).data] == [100, 100]


@pytest.mark.asyncio
async def test_names_and_fields_of_a_form_have_bounds(batching):
    async with batching() as client, httpx.AsyncClient(base_url=str(client.base_url)) as http:
        content = jsonl(line(1))
        for name, kept in (("x" * 255, "x" * 255), ("x" * 256, "x" * 255), ("a\u202eb", "ab")):
            file = await client.files.create(file=(name, content), purpose="batch")
            assert file.filename == kept
        for size, words in ((4096, "purpose must be batch"), (4097, "'purpose' is too long")):
            answer = await http.post(
                "files", files={"file": ("a", content)}, data={"purpose": "p" * size}
            )
            assert answer.status_code == 400
            assert answer.json()["error"]["message"].startswith(words)
        twice = [("file", ("a", content))] * 2
        answer = await http.post("files", files=twice, data={"purpose": "batch"})
        assert answer.json()["error"]["message"] == "the form has 'file' twice"


@pytest.mark.asyncio
async def test_a_file_of_50000_lines_is_taken(batching):
    async with batching() as client:
        file = await client.files.create(file=("a", b"{}\n" * 50_000), purpose="batch")
        assert file.bytes == 150_000


@given(
    st.lists(st.sampled_from([b"a", b"bc", b" ", b"\r", b"\n", b"\n\n"]), max_size=40).map(
        b"".join
    ),
    st.integers(1, 6),
)
def test_lines_are_numbered_and_those_above_the_bound_have_no_text(content, most):
    expected = [
        (number, text if len(text) <= most else None)
        for number, text in enumerate(io.BytesIO(content), 1)
        if text.strip() or len(text) > most
    ]
    assert list(batch_line.lines_of(io.BytesIO(content), most)) == expected


def test_the_errors_of_a_file_are_listed_up_to_100(tmp_path):
    path, stop = tmp_path / "in", threading.Event()

    def checked(*lines: Any) -> tuple[int, list[Any]]:
        path.write_bytes(jsonl(*lines))
        return batch_runner.check_input(path, CHAT, 4096, stop)

    total, errors = checked(*[b"{"] * 99, line(1))
    assert (total, len(errors)) == (100, 99)
    _, errors = checked(*[b"{"] * 150)
    assert [error.line for error in errors] == list(range(1, 101))
    longest = line(1) | {"custom_id": "x" * 512}
    assert checked(longest, line(2)) == (2, [])
    _, (error,) = checked(longest | {"custom_id": "x" * 513}, line(2))
    assert (error.code, error.line, error.param) == ("invalid_request", 1, "custom_id")
    _, (error,) = checked(line(1), line(2), line(1))
    assert (error.code, error.line, error.param) == ("duplicate_custom_id", 3, "custom_id")
    total, (error,) = checked()
    assert (total, error.code, error.line) == (0, "empty_file", None)


def test_a_file_of_more_lines_than_the_limit_is_one_error(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_runner, "MAX_LINES", 3)
    path, stop = tmp_path / "in", threading.Event()
    path.write_bytes(jsonl(*map(line, range(3))))
    assert batch_runner.check_input(path, CHAT, 4096, stop) == (3, [])
    path.write_bytes(jsonl(*map(line, range(9))))
    total, (error,) = batch_runner.check_input(path, CHAT, 4096, stop)
    assert (total, error.code, error.line) == (4, "too_many_requests", None)


def refusal(arriving: ExitStack, store: BatchStore, owner: str) -> tuple[int, str | None]:
    """Status and code of the error of one more file."""
    with pytest.raises(ApiError) as caught:
        arriving.enter_context(store.upload(owner))
    return caught.value.status, caught.value.code


def test_of_the_files_that_arrive_at_once_a_key_has_half(tmp_path):
    store = BatchStore(tmp_path)
    with ExitStack() as arriving:
        for _ in range(4):
            arriving.enter_context(store.upload("ann"))
        assert refusal(arriving, store, "ann") == (503, "too_many_bodies")
        for _ in range(4):
            arriving.enter_context(store.upload("bob"))
        assert refusal(arriving, store, "eve") == (503, "too_many_bodies")
    with ExitStack() as arriving:  # without keys all clients are one
        for _ in range(8):
            arriving.enter_context(store.upload(""))
        assert refusal(arriving, store, "") == (503, "too_many_bodies")
    with ExitStack() as arriving:
        for owner in ("ann", "") * 4:
            arriving.enter_context(store.upload(owner))
    store.close()


def test_files_that_arrive_count_as_those_that_are_there(tmp_path, monkeypatch):
    monkeypatch.setattr(file_store, "MAX_FILES", 2)
    store = BatchStore(tmp_path)
    with ExitStack() as arriving:
        for _ in range(2):
            arriving.enter_context(store.upload("ann"))
        assert refusal(arriving, store, "ann") == (429, "rate_limit_exceeded")
        arriving.enter_context(store.upload("bob"))
    monkeypatch.setattr(file_store, "MAX_KEY_BYTES", 2 * file_store.MAX_FILE_BYTES + 1)
    monkeypatch.setattr(file_store, "MAX_FILES", 9)
    with ExitStack() as arriving:
        for _ in range(3):
            arriving.enter_context(store.upload("ann"))
        assert refusal(arriving, store, "ann") == (429, "rate_limit_exceeded")
    monkeypatch.setattr(file_store, "MAX_KEY_BYTES", 2 * file_store.MAX_FILE_BYTES)
    with ExitStack() as arriving:
        for _ in range(2):
            arriving.enter_context(store.upload("ann"))
        assert refusal(arriving, store, "ann") == (429, "rate_limit_exceeded")
    store.close()


def new_batch(number: int, **fields: Any) -> Batch:
    needed = {"completion_window": "24h", "endpoint": CHAT, "input_file_id": "file-1"}
    needed |= {"object": "batch", "status": "validating", "created_at": number}
    return Batch(id=f"batch_{number:032x}", **(needed | fields))


@pytest.mark.asyncio
async def test_of_the_batches_that_have_not_ended_a_key_has_a_quarter(tmp_path, monkeypatch):
    monkeypatch.setattr(file_store, "MAX_UNFINISHED", 8)
    store = BatchStore(tmp_path)
    numbers = itertools.count()
    for owner in ("ann", "bob", "eve"):
        for _ in range(2):
            await store.add_batch(owner, new_batch(next(numbers)))
        with pytest.raises(ApiError, match="2 batches have not ended") as caught:
            await store.add_batch(owner, new_batch(next(numbers)))
        assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
    for _ in range(2):
        await store.add_batch("", new_batch(next(numbers)))
    for owner in ("", "joe"):
        with pytest.raises(ApiError, match="batches have not ended"):
            await store.add_batch(owner, new_batch(next(numbers)))
    assert len(store.unfinished) == 8
    store.close()


@pytest.mark.asyncio
async def test_the_oldest_of_a_keys_ended_batches_is_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(file_store, "MAX_ENDED", 2)
    store = BatchStore(tmp_path)
    for number in range(5):
        batch = await store.add_batch("ann", new_batch(number))
        store.set_batch(batch.batch.id, status="completed")
        await store.save_batch(batch.batch.id)
        kept = [each.batch.created_at for each in store.batches.values()]
        assert kept == list(range(max(0, number - 2), number + 1))
    store.close()
    store = BatchStore(tmp_path)
    assert [each.batch.created_at for each in store.batches.values()] == [2, 3, 4]
    store.close()


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=4), st.integers(1, 50))
@settings(max_examples=200, deadline=None)
def test_a_form_is_read_the_same_however_it_arrives(contents, size):
    body = b""
    for n, content in enumerate(contents):
        head = f'--b0und\r\nContent-Disposition: form-data; name="n{n}"; filename="f"\r\n\r\n'
        body += head.encode() + content.replace(b"--b0und", b"") + b"\r\n"
    body += b"--b0und--\r\n"
    form = FormReader("multipart/form-data; boundary=b0und")
    read: list[bytes] = []
    for start in range(0, len(body), size):
        for found in form.feed(body[start : start + size]):
            if isinstance(found, tuple):
                assert found == (f"n{len(read)}", "f")
                read.append(b"")
            else:
                read[-1] += found
    assert form.is_complete
    assert read == [content.replace(b"--b0und", b"") for content in contents]


def test_a_form_without_end_of_headers_is_bounded():
    form = FormReader("multipart/form-data; boundary=b")
    with pytest.raises(ApiError, match="headers of a part"):
        for _ in range(100):
            list(form.feed(b"--b\r\n" + b"x" * 1000))


def one_part(boundary: str = "b", headers: bytes = b"", name: str = "a") -> bytes:
    mark = f"--{boundary}\r\n".encode()
    return mark + headers + f'Content-Disposition: form-data; name="{name}"\r\n\r\n1'.encode()


@pytest.mark.parametrize(("length", "is_taken"), [(1, True), (200, True), (201, False)])
def test_a_boundary_has_up_to_200_characters(length, is_taken):
    boundary = "b" * length
    if is_taken:
        form = FormReader(f"multipart/form-data; boundary={boundary}")
        body = one_part(boundary) + f"\r\n--{boundary}--".encode()
        assert list(form.feed(body)) == [("a", None), b"1"]
        assert form.is_complete
    else:
        with pytest.raises(ApiError, match="1 to 200 ASCII"):
            FormReader(f"multipart/form-data; boundary={boundary}")


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 415),
        ("multipart/mixed; boundary=b", 415),
        ("multipart/form-data", 415),
        ('multipart/form-data; boundary=""', 400),
        ("multipart/form-data; boundary=é", 400),
    ],
)
def test_a_form_needs_a_type_and_a_boundary(content_type, status):
    with pytest.raises(ApiError) as caught:
        FormReader(content_type)
    assert caught.value.status == status


def test_a_form_has_up_to_16_parts():
    form = FormReader("multipart/form-data; boundary=b")
    parts = b"\r\n".join(one_part(name=f"n{n}") for n in range(16))
    assert len(list(form.feed(parts + b"\r\n--b--"))) == 32
    form = FormReader("multipart/form-data; boundary=b")
    with pytest.raises(ApiError, match="more than 16 parts"):
        list(form.feed(parts + b"\r\n" + one_part(name="n16") + b"\r\n--b--"))


@pytest.mark.parametrize("step", [1, 20_000])
def test_the_headers_of_a_part_have_up_to_8192_bytes(step):
    least = len(one_part()) - len(b"--b\r\n\r\n\r\n1")
    for length, is_taken in ((8192, True), (8193, False)):
        padding = b"X: ".ljust(length - least - 4, b"x") + b"\r\n"
        body = one_part(headers=padding)
        assert body.index(b"\r\n\r\n") - len(b"--b") == length
        form = FormReader("multipart/form-data; boundary=b")
        pieces = [body[at : at + step] for at in range(0, len(body), step)]
        if is_taken:
            assert next(each for piece in pieces for each in form.feed(piece)) == ("a", None)
        else:
            with pytest.raises(ApiError, match="more than 8192 bytes"):
                [each for piece in pieces for each in form.feed(piece)]


@given(st.integers(0, 7), st.integers(1, 9))
def test_pages_of_a_list_have_each_item_once(count, limit):
    items = [new_batch(number) for number in range(count)]
    after, found = None, []
    while True:
        listed = page(items, after, limit)
        found += [each["id"] for each in listed["data"]]
        ids = [each["id"] for each in listed["data"]] or [None]
        assert (listed["first_id"], listed["last_id"]) == (ids[0], ids[-1])
        after = listed["last_id"]
        if not listed["has_more"]:
            break
        assert len(listed["data"]) == limit
    assert found == [item.id for item in items]


def test_a_page_after_nothing_of_the_list_is_an_error():
    with pytest.raises(InvalidRequest, match="'file-7' is none of this list") as caught:
        page([new_batch(1)], "file-7", 5)
    assert caught.value.field == "after"


@pytest.mark.asyncio
@pytest.mark.parametrize(("path", "most"), [("files", 10_000), ("batches", 100)])
async def test_a_page_has_a_bound(batching, path, most):
    async with batching() as client, httpx.AsyncClient(base_url=str(client.base_url)) as http:
        for limit, status in ((0, 400), (1, 200), (most, 200), (most + 1, 400)):
            assert (await http.get(path, params={"limit": limit})).status_code == status


def test_what_follows_a_whole_form_is_not_kept():
    form = FormReader("multipart/form-data; boundary=b")
    list(form.feed(b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--b--'))
    assert form.is_complete
    tracemalloc.start()
    try:
        for _ in range(100):
            assert list(form.feed(bytes(10_000))) == []
        assert tracemalloc.get_traced_memory()[0] < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.asyncio
async def test_a_batch_goes_on_after_a_restart_and_answers_each_line_once(batching, engine, soon):
    async with batching() as client:
        engine.delay = 0.005
        batch = await created(client, jsonl(*map(line, range(60))))

        async def is_under_way() -> bool:
            return (await client.batches.retrieve(batch.id)).request_counts.completed >= 10

        await soon(is_under_way)
    assert len(engine.requests) < 60
    engine.delay = 0.0
    async with batching() as client:
        batch = await ended(client, batch.id)
        assert batch.status == "completed"
        assert (batch.request_counts.completed, batch.error_file_id) == (60, None)
        answers = await lines_of(client, batch.output_file_id)
        assert sorted(a["custom_id"] for a in answers) == sorted(f"r{n}" for n in range(60))


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_answers_that_a_crash_has_cut_are_whole_lines_again(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("answers")
    files = AnswerFiles(directory / "out", directory / "err")
    count = data.draw(st.integers(0, 5))
    for n in range(count):
        files.append([{"custom_id": f"r{n}"}], is_output=True)
    content = files.output.read_bytes() if count else b""
    cut = data.draw(st.integers(0, len(content)))
    rest = data.draw(st.sampled_from([b"", b"\0\0", b"{", b"[]\n"]))
    files.output.write_bytes(content[:cut] + rest)
    whole = content[:cut].count(b"\n")
    assert files.recover() == {f"r{n}": True for n in range(whole)}
    left = files.output.read_bytes()
    assert left == b"".join(content.splitlines(keepends=True)[:whole])


class Reading:
    """Reads the lines of files; at the third in all a thread waits for ``go``."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.go = threading.Event()
        self._num_open = 0

    def __call__(self, *args: Any):
        self._num_open += 1
        try:
            for number, text in batch_line.lines_of(*args):
                self.numbers.append(number)
                if len(self.numbers) == 3:
                    self.go.wait(60)
                yield number, text
        finally:
            self._num_open -= 1

    def waits(self) -> bool:
        return len(self.numbers) == 3

    def has_ended(self) -> bool:
        return not self._num_open


@pytest.fixture
def reading():
    found = Reading()
    yield found
    found.go.set()


@pytest.mark.asyncio
@pytest.mark.parametrize("end", ["stop", "cancel"])
async def test_the_check_of_an_input_ends_with_the_server_or_its_batch(
    batching, monkeypatch, soon, reading, end
):
    monkeypatch.setattr(batch_runner, "lines_of", reading)
    async with batching() as client:
        batch = await created(client, jsonl(*map(line, range(1000))))
        await soon(reading.waits)
        if end == "cancel":
            await client.batches.cancel(batch.id)
            reading.go.set()
            assert (await ended(client, batch.id)).status == "cancelled"
    reading.go.set()
    await soon(reading.has_ended)
    assert reading.numbers == [1, 2, 3]


@pytest.mark.asyncio
async def test_the_check_of_an_upload_ends_with_its_request(
    engine, tmp_path, monkeypatch, soon, reading
):
    monkeypatch.setattr(routes_of_batches, "lines_of", reading)
    app = create_app(engine, ServerSettings(batch_directory=str(tmp_path)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://s") as http:
        files = {"file": ("a", jsonl(*map(line, range(1000))))}
        upload = asyncio.create_task(http.post("/v1/files", files=files, data={"purpose": "batch"}))
        await soon(reading.waits)
        upload.cancel()
        assert (await upload).json()["error"]["code"] == "server_stopping"
    reading.go.set()
    await soon(reading.has_ended)
    assert reading.numbers == [1, 2, 3]


@pytest.mark.asyncio
async def test_a_server_that_stops_writes_no_further_expired_lines_and_the_next_does(
    batching, engine, monkeypatch, tmp_path, soon, reading
):
    engine.delay = 1000.0
    async with batching() as client:
        batch = await created(client, jsonl(*map(line, range(100))))
        await soon(lambda: engine.running)
    path = tmp_path / "b" / f"{batch.id}.json"
    record = json.loads(path.read_text())
    record["batch"].update(status="finalizing", expired_at=record["batch"]["created_at"])
    path.write_text(json.dumps(record))
    with monkeypatch.context() as patch:
        patch.setattr(batch_runner, "lines_of", reading)
        async with batching():
            await soon(reading.waits)
        reading.go.set()
        await soon(reading.has_ended)
    assert reading.numbers == [1, 2, 3]
    async with batching() as client:
        batch = await ended(client, batch.id)
        assert batch.status == "expired"
        names = [each["custom_id"] for each in await lines_of(client, batch.error_file_id)]
        assert sorted(names) == sorted(f"r{n}" for n in range(100))


@pytest.mark.asyncio
async def test_a_cancelled_batch_keeps_what_is_answered(batching, engine, soon):
    engine.delay = 0.005
    async with batching() as client:
        batch = await created(client, jsonl(*map(line, range(200))))

        async def is_under_way() -> bool:
            return (await client.batches.retrieve(batch.id)).request_counts.completed >= 5

        await soon(is_under_way)
        with pytest.raises(openai.ConflictError, match="uses the file"):
            await client.files.delete(batch.input_file_id)
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        batch = await ended(client, batch.id)
        assert batch.status == "cancelled"
        assert batch.cancelled_at is not None
        answers = await lines_of(client, batch.output_file_id)
        assert 5 <= len(answers) == batch.request_counts.completed < 200
        await soon(lambda: not engine.running)
        with pytest.raises(openai.ConflictError, match="status 'cancelled'"):
            await client.batches.cancel(batch.id)


@pytest.mark.asyncio
async def test_a_line_that_is_being_written_while_its_batch_is_cancelled_counts(
    batching, monkeypatch, soon
):
    append, began, may_end = AnswerFiles.append, threading.Event(), threading.Event()

    def slow(self, lines, *, is_output):
        began.set()
        assert may_end.wait(30)
        append(self, lines, is_output=is_output)

    monkeypatch.setattr(AnswerFiles, "append", slow)
    async with batching() as client:
        batch = await created(client, jsonl(*map(line, range(3))))
        await soon(began.is_set)
        try:
            await client.batches.cancel(batch.id)
            for _ in range(20):
                assert (await client.batches.retrieve(batch.id)).status == "cancelling"
        finally:
            may_end.set()
        batch = await ended(client, batch.id)
        answers = await lines_of(client, batch.output_file_id)
        assert len(answers) == batch.request_counts.completed > 0


@pytest.mark.asyncio
async def test_a_batch_expires_and_says_which_lines_were_not_answered(
    batching, engine, soon, tmp_path
):
    async with batching() as client:
        engine.delay = 0.01
        batch = await created(client, jsonl(*map(line, range(60))))

        async def is_under_way() -> bool:
            return (await client.batches.retrieve(batch.id)).request_counts.completed >= 3

        await soon(is_under_way)
    path = tmp_path / "b" / f"{batch.id}.json"
    record = json.loads(path.read_text())
    record["batch"]["expires_at"] = record["batch"]["created_at"] - 1
    path.write_text(json.dumps(record))
    async with batching() as client:
        batch = await ended(client, batch.id)
        assert batch.status == "expired"
        answers = await lines_of(client, batch.output_file_id)
        failures = await lines_of(client, batch.error_file_id)
        assert 3 <= len(answers) < 60
        assert {each["error"]["code"] for each in failures} == {"batch_expired"}
        names = [each["custom_id"] for each in (*answers, *failures)]
        assert sorted(names) == sorted(f"r{n}" for n in range(60))


@pytest.mark.asyncio
async def test_the_batches_of_one_key_push_out_none_of_another(serving, tmp_path, monkeypatch):
    monkeypatch.setattr(file_store, "MAX_ENDED", 1)
    async with (
        serving(batch_directory=str(tmp_path), api_keys=["one", "two"]) as url,
        client_of(url, "one") as one,
        client_of(url, "two") as two,
    ):
        kept = await ended(one, (await created(one, jsonl(line(1)))).id)
        for _ in range(3):
            last = await ended(two, (await created(two, jsonl(line(1)))).id)
        assert [batch.id for batch in (await one.batches.list()).data] == [kept.id]
        assert len((await two.batches.list()).data) == 2
        assert (await two.batches.list()).data[0].id == last.id


@pytest.mark.asyncio
async def test_files_and_batches_belong_to_their_key(serving, tmp_path):
    async with serving(batch_directory=str(tmp_path), api_keys=["one", "two"]) as url:
        async with client_of(url, "one") as one, client_of(url, "two") as two:
            batch = await ended(one, (await created(one, jsonl(line(1)))).id)
            assert batch.status == "completed"
            for call in (two.files.retrieve, two.files.delete, two.files.content):
                with pytest.raises(openai.NotFoundError, match="No such File object"):
                    await call(batch.output_file_id)
            for call in (two.batches.retrieve, two.batches.cancel):
                with pytest.raises(openai.NotFoundError, match="No batch found with id"):
                    await call(batch.id)
            with pytest.raises(openai.NotFoundError):
                await two.batches.create(
                    input_file_id=batch.input_file_id,
                    endpoint=CHAT,
                    completion_window="24h",
                )
            assert (await two.files.list()).data == (await two.batches.list()).data == []
            assert len((await one.files.list()).data) == 2
        async with client_of(url, "wrong") as wrong:
            with pytest.raises(openai.AuthenticationError):
                await wrong.files.create(file=("a", jsonl(line(1))), purpose="batch")


@pytest.mark.asyncio
async def test_files_of_unnamed_keys_stay_theirs_when_keys_change(serving, tmp_path):
    async def files_of(url: str, key: str) -> list[str]:
        async with client_of(url, key) as client:
            return [file.id for file in (await client.files.list()).data]

    async with (
        serving(batch_directory=str(tmp_path), api_keys=["sk-one", "sk-two"]) as url,
        client_of(url, "sk-one") as one,
        httpx.AsyncClient() as http,
    ):
        batch = await ended(one, (await created(one, jsonl(line(1)))).id)
        names = (batch.output_file_id, batch.input_file_id)
        # Metrics are open, so that they have the name alone.
        metrics = (await http.get(f"{url}/metrics")).text
        assert 'trencadis:key_requests_total{api_key="key-1"' in metrics
        assert "sha256" not in metrics
    async with serving(batch_directory=str(tmp_path), api_keys=["sk-two", "sk-one"]) as url:
        assert await files_of(url, "sk-two") == []
        assert set(await files_of(url, "sk-one")) == set(names)
    records = b"".join(path.read_bytes() for path in tmp_path.glob("*.json"))
    assert b"sk-one" not in records


@pytest.mark.asyncio
async def test_ids_of_clients_are_no_paths(batching, tmp_path):
    (tmp_path / "secret.jsonl").write_text("{}\n")
    async with batching() as client, httpx.AsyncClient() as http:
        for name in ("..%2Fsecret", "%2e%2e%2fsecret", "lock", "file-" + "0" * 32, "a%00b"):
            for path in (f"files/{name}", f"files/{name}/content", f"batches/{name}"):
                assert (await http.get(f"{client.base_url}{path}")).status_code == 404


@pytest.mark.asyncio
async def test_a_full_disk_is_an_error_and_a_batch_waits_for_it(
    batching, engine, monkeypatch, soon
):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with batching() as client:
        write = file_store._write_all
        monkeypatch.setattr(file_store, "_write_all", full)
        batch = await created(client, jsonl(*map(line, range(5))))
        await soon(lambda: len(engine.requests) >= 4)
        assert (await client.batches.retrieve(batch.id)).request_counts.completed == 0
        monkeypatch.setattr(file_store.os, "fsync", full)
        with pytest.raises(openai.InternalServerError, match="No space left") as caught:
            await client.files.create(file=("a", jsonl(line(1))), purpose="batch")
        assert caught.value.status_code == 507
        chat = await client.chat.completions.create(
            model="stand-in", messages=[{"role": "user", "content": "a"}]
        )
        assert chat.choices[0].message.content == "[user]a[assistant]"
        monkeypatch.undo()
        assert file_store._write_all is write
        batch = await ended(client, batch.id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 5)


@pytest.mark.asyncio
async def test_a_key_has_bounds_of_files_and_batches(batching, engine, monkeypatch):
    monkeypatch.setattr(file_store, "MAX_FILES", 2)
    monkeypatch.setattr(file_store, "MAX_UNFINISHED", 1)
    engine.delay = 0.05
    async with batching() as client:
        batch = await created(client, jsonl(*map(line, range(20))))
        with pytest.raises(openai.RateLimitError, match="1 batches have not ended"):
            await created(client, jsonl(line(1)))
        with pytest.raises(openai.RateLimitError, match="2 files"):
            await created(client, jsonl(line(1)))
        await client.batches.cancel(batch.id)
        await ended(client, batch.id)
        monkeypatch.setattr(file_store, "MAX_KEY_BYTES", 10)
        monkeypatch.setattr(file_store, "MAX_FILES", 20)
        with pytest.raises(openai.RateLimitError, match="at most 10 are kept"):
            await created(client, jsonl(line(1)))
        batch_of_file = partial(
            client.batches.create,
            input_file_id=batch.input_file_id,
            endpoint=CHAT,
            completion_window="24h",
        )
        with pytest.raises(openai.RateLimitError, match="at most 10 are kept"):
            await batch_of_file()
        monkeypatch.setattr(file_store, "MAX_FILES", 1)
        with pytest.raises(openai.RateLimitError, match="the most that there may be"):
            await batch_of_file()
        assert [each.id async for each in client.batches.list()] == [batch.id]


@pytest.mark.asyncio
async def test_few_lines_run_at_once_and_with_the_lowest_priority(batching, engine, soon):
    engine.delay = 0.01
    async with batching() as client:
        batch = await created(client, jsonl(*map(line, range(60))))
        most = 0
        while (await client.batches.retrieve(batch.id)).status not in ENDED:
            most = max(most, len(engine.running))
        # Half of the 32 sequences that the engine runs at once, as no one else asks.
        assert 1 < most <= 16
        priorities = {request[3] for request in engine.requests}
        assert priorities == {batch_runner.LOWEST_PRIORITY}


@pytest.mark.asyncio
async def test_lines_wait_for_a_model_that_is_switched_away(tmp_path, served, soon):
    engine = SwitchingStandIn()
    aliases = engine.aliases
    active, other = engine.active, next(a for a in aliases if a != engine.active)
    app = create_app(engine, ServerSettings(batch_directory=str(tmp_path)))
    async with served(app) as url, client_of(url) as client:
        messages = [{"role": "user", "content": "a"}]
        lines = [
            line(1, model=other, messages=messages),
            line(2, model=active, messages=messages),
        ]
        batch = await created(client, jsonl(*lines))

        async def first_is_done() -> bool:
            return (await client.batches.retrieve(batch.id)).request_counts.completed == 1

        await soon(first_is_done)
        await engine.switch_model(other)
        batch = await ended(client, batch.id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 2)


class PoisonedEngine(StandInEngine):
    """Its core ends with each request that has the word poison, and all that run are lost."""

    def __init__(self) -> None:
        super().__init__()
        self.deaths: list[int] = []
        """How many requests ran at each death."""
        self.num_refused = 0
        self.restarts = True
        self._num_running = 0
        self._death = asyncio.Event()

    async def generate(self, request):
        if self.num_refused > 0:
            self.num_refused -= 1
            raise EngineRestarting("the core is being restarted", is_refusal=True)
        death = self._death
        self._num_running += 1
        try:
            if b"poison" in bytes(self.tokenizer.decode(request.prompt_token_ids), "utf-8"):
                await asyncio.sleep(0.05)
                self.deaths.append(self._num_running)
                self.num_refused = 20 if self.restarts else 10**9
                self._death = asyncio.Event()
                death.set()
                raise EngineRestarting("the core ended")
            async for delta in super().generate(request):
                if death.is_set():
                    raise EngineRestarting("the core ended")
                yield delta
        finally:
            self._num_running -= 1


@pytest.fixture
def poisoned(monkeypatch, served, tmp_path):
    """``engine, start``: ``async with start() as client`` of a server that soon tries again."""
    engine = PoisonedEngine()
    engine.delay = 0.01

    def runner(store: Any, **fields: Any):
        return batch_runner.BatchRunner(store, **(fields | {"retry_after": 0.01}))

    @asynccontextmanager
    async def start():
        app = create_app(engine, ServerSettings(batch_directory=str(tmp_path)))
        async with served(app) as url, client_of(url) as client:
            yield client

    monkeypatch.setattr(app_module, "BatchRunner", runner)
    return engine, start


POISON = line(7, messages=[{"role": "user", "content": "poison"}])


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_line_with_which_the_core_ends_is_sent_alone_and_then_given_up(poisoned):
    engine, start = poisoned
    async with start() as client:
        lines = [POISON if n == 7 else line(n) for n in range(20)]
        batch = await ended(client, (await created(client, jsonl(*lines))).id)
        counts = batch.request_counts
        assert (batch.status, counts.completed, counts.failed) == ("completed", 19, 1)
        (failure,) = await lines_of(client, batch.error_file_id)
        assert (failure["custom_id"], failure["error"]["code"]) == ("r7", "engine_error")
        assert failure["response"] is None
        assert engine.deaths[0] > 1
        assert engine.deaths[1:] == [1, 1]


@pytest.mark.asyncio
async def test_deaths_of_the_core_are_counted_across_restarts_of_the_server(poisoned, soon):
    engine, start = poisoned
    engine.restarts = False
    batch_id = ""
    for count in (1, 2, 3):
        engine.num_refused = 0
        async with start() as client:
            batch_id = batch_id or (await created(client, jsonl(POISON))).id
            await soon(lambda count=count: len(engine.deaths) == count)
    async with start() as client:
        batch = await ended(client, batch_id)
        (failure,) = await lines_of(client, batch.error_file_id)
        assert failure["error"]["code"] == "engine_error"
    assert len(engine.deaths) == 3


@pytest.mark.asyncio
async def test_an_overloaded_engine_is_no_death(poisoned, soon):
    engine, start = poisoned
    engine.num_refused = 30
    async with start() as client:
        batch = await created(client, jsonl(line(1)))
        await soon(lambda: engine.num_refused < 20)
        engine.overloaded = True
        await soon(lambda: engine.num_refused == 0)
        await asyncio.sleep(0.1)
        engine.overloaded = False
        assert (await ended(client, batch.id)).request_counts.completed == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("record", ["null", "[]", '"a"', '{"batch": null}', "{"])
async def test_a_record_that_cannot_be_read_is_left_alone_with_its_answers(
    batching, tmp_path, caplog, record
):
    async with batching() as client:
        file = await client.files.create(file=("a", jsonl(line(1))), purpose="batch")
    directory = tmp_path / "b"
    broken = [directory / f"{kind}{'0' * 32}.json" for kind in ("batch_", "file-")]
    for path in broken:
        path.write_text(record)
    answers = directory / f"file-{'1' * 32}.jsonl"
    answers.write_text("{}\n")
    async with batching() as client:
        assert [each.id for each in (await client.files.list()).data] == [file.id]
        assert (await client.batches.list()).data == []
    assert answers.exists()
    for path in broken:
        assert path.read_text() == record
        assert f"The record {path} cannot be read" in caplog.text


def test_a_directory_that_cannot_be_used_is_named(engine, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=re.escape(f"batch_directory {tmp_path}/file")):
        create_app(engine, ServerSettings(batch_directory=str(tmp_path / "file")))


@pytest.mark.asyncio
async def test_without_a_directory_there_are_no_batches(client):
    assert (await client.get("/v1/files")).status_code == 404
    assert (await client.post("/v1/batches", json={})).status_code == 404


@pytest.mark.slow
def test_a_server_that_is_killed_loses_no_line_and_repeats_none(tmp_path):
    model = save_tiny_model(tmp_path / "model")
    flags = (str(model), "--num-gpu-blocks-override", "64", "--warmup", "none")
    flags += ("--max-num-seqs", "8", "--batch-directory", str(tmp_path / "b"))
    url = "/v1/completions"
    body = {"prompt": "hello", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    lines = [line(n, url, **body) for n in range(120)]
    batch, done = None, 0
    for is_last in (False, False, True):
        server = ServerProcess(*flags)
        try:
            address = server.wait_for(r"Serving \S+ at (\S+)", 240)[1]
            client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=60)
            if batch is None:
                file = client.files.create(file=("in.jsonl", jsonl(*lines)), purpose="batch")
                batch = client.batches.create(
                    input_file_id=file.id, endpoint=url, completion_window="24h"
                )
            batch = client.batches.retrieve(batch.id)
            before = done
            while batch.status not in ENDED and (is_last or done < before + 20):
                time.sleep(0.05)
                batch = client.batches.retrieve(batch.id)
                done = max(done, batch.request_counts.completed)
            if not is_last:
                assert batch.status == "in_progress"
        finally:
            server.kill()
            if batch is not None and not is_last:
                answers = list((tmp_path / "b").glob("*.jsonl"))
                assert len(answers) == 2
        if is_last:
            assert batch.status == "completed"
    record = json.loads((tmp_path / "b" / f"{batch.id}.json").read_text())
    written = (tmp_path / "b" / f"{record['output_id']}.jsonl").read_text().splitlines()
    names = [json.loads(each)["custom_id"] for each in written]
    assert sorted(names) == sorted(f"r{n}" for n in range(120))
