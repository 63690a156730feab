"""Send the same requests to two servers, and print where their answers differ.

    python tools/compare_servers.py ../before .                     # two checkouts: starts both
    python tools/compare_servers.py http://host:8000 http://host:8001

A checkout is served on a free port of this machine by ``engine-serve``, in float32 with the default
model; ``--flags`` replaces the flags. The requests are a seeded mix of completions and chats
(streamed or not, greedy or seeded, several samples, beams, log-probabilities, stop strings,
penalties), of bad requests, and of the other routes. They are sent one after the other, so that no
other request shares a batch with them: in another batch the last digits of a result differ. Give
both servers the same history: start them anew for each comparison.

Status, headers and body are compared byte for byte, apart from what depends on the time: ids,
creation times, and the values of most metrics. A difference is of one of these kinds:

    status    the status code
    headers   a header that the API defines
    body      the body
    wording   the body, in text for people alone: an error's message, a metric's help, the
              descriptions of the OpenAPI schema

Needs httpx. Exits with 1 if there is a difference.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import httpx

FLAGS = (
    "--dtype float32 --max-model-len 512 --num-gpu-blocks-override 200 --warmup none "
    "--disable-access-log --admin-api-key boss"
)
KINDS = ("status", "headers", "body", "wording")
HEADERS = ("content-type", "retry-after", "allow", "www-authenticate", "cache-control")
START_SECONDS = 300.0
"""Longest start of a server: the first one converts the default model."""

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
JSON = {"Content-Type": "application/json"}
ADMIN = {**JSON, "Authorization": "Bearer boss"}
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]

TEXTS = (
    "The capital of France is",
    "Once upon a time",
    "One, two, three, four,",
    "def fibonacci(n):",
    "Die Hauptstadt von Frankreich ist",
    "Le café était fermé, \N{SMILING FACE WITH OPEN MOUTH}",
    "Water boils at a temperature of",
    "List three colours: red,",
)


@dataclass(frozen=True)
class Ask:
    """One request. ``group`` is its row in the table."""

    group: str
    path: str
    body: bytes | None = field(default=None, repr=False)
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=lambda: JSON, repr=False)

    def __str__(self) -> str:
        return f"{self.method} {self.path} {(self.body or b'')[:160].decode(errors='replace')}"


def post(group: str, path: str, fields: object, headers: dict[str, str] | None = None) -> Ask:
    return Ask(group, path, json.dumps(fields).encode(), headers=headers or JSON)


def requests(count: int, seed: int, model: str, max_tokens: int) -> list[Ask]:
    """``count`` requests: all fixed ones, and as many generated ones between them as fit."""
    rng = random.Random(seed)
    fixed = [*bad_chats(), *bad_completions(), *bad_bodies(), *admin(), *monitoring(model)]
    generated = [
        rng.choice((chat, completion))(rng, model, max_tokens)
        for _ in range(max(0, count - len(fixed) - 1))
    ]
    mixed = [*fixed[: max(0, count - 1)], *generated]
    rng.shuffle(mixed)
    return [*mixed, Ask("metrics", "/metrics", method="GET")]


def chat(rng: random.Random, model: str, max_tokens: int) -> Ask:
    messages = [{"role": "user", "content": rng.choice(TEXTS)}]
    if rng.random() < 0.3:
        messages.insert(0, {"role": "system", "content": "You answer briefly."})
    if rng.random() < 0.2:
        messages += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Why?"}]
    fields: dict[str, Any] = {"messages": messages, **common(rng, model, max_tokens)}
    if rng.random() < 0.3 and "use_beam_search" not in fields:
        fields |= {"logprobs": True, "top_logprobs": rng.randint(0, 5)}
    if rng.random() < 0.2:
        fields["max_completion_tokens"] = rng.randint(1, max_tokens)
    return post(_group("chat", fields), CHAT, fields)


def completion(rng: random.Random, model: str, max_tokens: int) -> Ask:
    prompts: tuple[object, ...] = (
        rng.choice(TEXTS),
        [rng.randrange(3, 40_000) for _ in range(rng.randint(1, 40))],
        " ".join(rng.choice(TEXTS) for _ in range(12)),
    )
    fields = {"prompt": rng.choice(prompts), **common(rng, model, max_tokens)}
    if rng.random() < 0.2 and "stream" not in fields:
        # Several prompts may meet in a step or not: the order of a stream's events and the last
        # digits of log-probabilities depend on it.
        fields["prompt"] = rng.choice((rng.sample(TEXTS, 2), [[1, 2, 3], [4, 5, 6, 7]]))
    elif "use_beam_search" not in fields:
        extra = rng.choice(
            ({}, {"echo": True}, {"logprobs": rng.randint(0, 5)}, {"logprobs": 2}, {"best_of": 4})
        )
        fields |= extra
    return post(_group("completions", fields), COMPLETIONS, fields)


def common(rng: random.Random, model: str, max_tokens: int) -> dict[str, Any]:
    """What chats and completions have in common."""
    fields: dict[str, Any] = {"max_tokens": rng.randint(1, max_tokens)}
    if rng.random() < 0.5:
        fields["model"] = model
    if rng.random() < 0.4:
        fields["stream"] = True
        if rng.random() < 0.6:
            throughout = rng.random() < 0.5
            fields["stream_options"] = {
                "include_usage": True,
                "continuous_usage_stats": throughout,
            }
    if rng.random() < 0.1:
        return {**fields, "use_beam_search": True, "n": rng.randint(1, 3), "temperature": 0}
    fields |= {"temperature": 0} if rng.random() < 0.4 else seeded(rng)
    options: dict[str, object] = {
        "n": rng.randint(2, 3),
        "stop": rng.choice((".", [" the", ","], ["\n", " Paris", " a"], "e")),
        "include_stop_str_in_output": True,
        "presence_penalty": round(rng.uniform(-2, 2), 2),
        "frequency_penalty": round(rng.uniform(-2, 2), 2),
        "repetition_penalty": round(rng.uniform(0.5, 2), 2),
        "logit_bias": {str(rng.randrange(1000)): rng.randint(-100, 20)},
        "min_tokens": 1,
        "ignore_eos": True,
        "stop_token_ids": [rng.randrange(1000)],
        "skip_special_tokens": False,
        "priority": rng.randint(-3, 3),
        "user": "somebody",
        "unheard_of": 1,
    }
    for name in rng.sample(sorted(options), rng.choice((0, 0, 1, 2, 3))):
        fields[name] = options[name]
    if "n" in fields:
        # The core may compute a token more for a stopped sample, in a batch with the others.
        fields.pop("stop", None)
    return fields


def seeded(rng: random.Random) -> dict[str, Any]:
    temperature, seed = round(rng.uniform(0.3, 1.8), 2), rng.randrange(-(2**31), 2**31)
    options = {
        "top_p": round(rng.uniform(0.05, 1), 2),
        "top_k": rng.randint(-1, 60),
        "min_p": round(rng.uniform(0, 0.3), 2),
    }
    chosen = rng.sample(sorted(options), rng.randint(0, 2))
    return {"temperature": temperature, "seed": seed, **{name: options[name] for name in chosen}}


def _group(kind: str, fields: dict[str, Any]) -> str:
    return f"{kind}, streamed" if fields.get("stream") else kind


BAD_CHATS: tuple[dict[str, Any], ...] = (
    {"messages": []},
    {"messages": "hello"},
    {"messages": [1]},
    {"messages": [{"content": "a"}]},
    {"messages": [{"role": "user"}]},
    {"messages": [{"role": "tool", "content": "a"}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    {"messages": [{"role": "user", "content": "\ud800"}]},
    {"messages": [{"role": "user", "content": "word " * 600}]},
    {"model": "other"},
    {"model": 5},
    {"max_tokens": 0},
    {"max_tokens": "5"},
    {"max_tokens": 10**9},
    {"max_completion_tokens": 10**9},
    {"temperature": -1},
    {"temperature": "hot"},
    {"top_p": 0},
    {"top_k": -2},
    {"min_p": 2},
    {"n": 0},
    {"n": 1000},
    {"seed": 2**70},
    {"presence_penalty": 5},
    {"frequency_penalty": "x"},
    {"repetition_penalty": 0},
    {"stop": ""},
    {"stop": ["a"] * 17},
    {"stop_token_ids": [99_999_999]},
    {"logit_bias": {"65": 101}},
    {"logit_bias": {"x": 1}},
    {"logit_bias": {"99999999": 1}},
    {"min_tokens": 9, "max_tokens": 8},
    {"logprobs": True, "top_logprobs": 21},
    {"top_logprobs": 2},
    {"stream": "yes"},
    {"stream": True, "temperature": -1},
    {"stream_options": {"include_usage": True}},
    {"continue_final_message": True, "add_generation_prompt": True},
    {"chat_template_kwargs": {"tokenize": True}},
    {"priority": 2**63},
    {"tools": [{"type": "function"}]},
    {"response_format": {"type": "json_object"}},
    {"guided_json": {}},
    {"use_beam_search": True, "temperature": 0.7},
    {"use_beam_search": True, "stop": "a"},
    {"length_penalty": 2},
    {"use_beam_search": True, "early_stopping": "soon"},
    {"chat_template": "{{ x }}"},
)

BAD_COMPLETIONS: tuple[dict[str, Any], ...] = (
    {},
    {"prompt": []},
    {"prompt": 5},
    {"prompt": [[]]},
    {"prompt": [1, "a"]},
    {"prompt": [-1]},
    {"prompt": [99_999_999]},
    {"prompt": "", "add_special_tokens": False},
    {"prompt": ["a"] * 1025},
    {"prompt": "word " * 600},
    {"prompt": "a", "logprobs": 21},
    {"prompt": "a", "best_of": 2, "n": 3},
    {"prompt": ["a"] * 1000, "best_of": 2},
    {"prompt": "a", "best_of": 2, "stream": True},
    {"prompt": "a", "suffix": "b"},
    {"prompt": "a", "max_tokens": 0},
    {"prompt": "a", "max_tokens": 1000},
    {"prompt": "a", "prompt_logprobs": 21},
)


def bad_chats() -> Iterator[Ask]:
    for fields in BAD_CHATS:
        yield post("bad requests", CHAT, {"messages": QUESTION, **fields})


def bad_completions() -> Iterator[Ask]:
    for fields in BAD_COMPLETIONS:
        yield post("bad requests", COMPLETIONS, fields)


def bad_bodies() -> Iterator[Ask]:
    for body in (b"{", b"[]", b"", b"null", b"\xff", b'{"prompt": "' + b"x" * 5_000_000 + b'"}'):
        yield Ask("bad requests", COMPLETIONS, body)
    yield Ask("bad requests", COMPLETIONS, b'{"prompt": "a"}', headers={})
    yield Ask("bad requests", CHAT, b"messages=a", headers={"Content-Type": "text/plain"})


def admin() -> Iterator[Ask]:
    path = "/v1/admin/batch"
    orders: tuple[object, ...] = (
        {"dry_run": True},
        {"force_evict": 1},
        {"max_num_seqs": 4, "dry_run": True},
        {"max_num_seqs": 10**6},
        {"max_num_seqs": 0},
        {"target_temp_c": 70},
        {"policy": "random"},
        {"unheard_of": 1},
        [],
    )
    for order in orders:
        yield post("admin", path, order, ADMIN)
    yield post("admin", path, {})
    yield post("admin", path, {}, {**JSON, "Authorization": "Bearer other"})


def monitoring(model: str) -> Iterator[Ask]:
    paths = ("/health", "/version", "/v1/models", f"/v1/models/{model}", "/v1/models/other")
    for path in (*paths, "/openapi.json", "/nothing", CHAT, COMPLETIONS):
        yield Ask("other routes", path, method="GET")
    for path in ("/health", "/metrics", "/v1/models"):
        yield post("other routes", path, {})


@dataclass(frozen=True)
class Difference:
    """Where two answers part: of a kind in `KINDS`, with what stands there in either."""

    ask: Ask
    kind: str
    first: str
    second: str

    def __str__(self) -> str:
        return f"[{self.kind}] {self.ask}\n    A: {self.first}\n    B: {self.second}"


def compare(ask: Ask, first: httpx.Response, second: httpx.Response) -> Difference | None:
    """The most serious difference between two answers, None where there is none."""
    if first.status_code != second.status_code:
        codes = (f"{answer.status_code} {answer.text[:120]}" for answer in (first, second))
        return Difference(ask, "status", *codes)
    headers = [{name: answer.headers.get(name) for name in HEADERS} for answer in (first, second)]
    if headers[0] != headers[1]:
        return Difference(ask, "headers", *map(str, headers))
    answers = [timeless(answer.text, ask.path) for answer in (first, second)]
    if answers[0] == answers[1]:
        return None
    facts = [without_wording(answer, ask.path) for answer in answers]
    if facts[0] == facts[1]:
        return Difference(ask, "wording", *_parting(answers))
    return Difference(ask, "body", *_parting(facts))


def timeless(text: str, path: str) -> str:
    """A body without what depends on the time."""
    if path == "/metrics":
        return "\n".join(map(_timeless_metric, text.splitlines()))
    text = re.sub(r"\b(chatcmpl|cmpl)-[0-9a-f]{32}\b", r"\1-ID", text)
    return re.sub(r'"created":\s*\d+', '"created":0', text)


_COUNTED = ("vllm:request_success_total", "vllm:prompt_tokens_total")
"""Metrics whose values follow from the requests alone."""


def _timeless_metric(line: str) -> str:
    if line.startswith(("#", *_COUNTED)):
        return line
    return line.rpartition(" ")[0]


def without_wording(text: str, path: str) -> str:
    """A body without what is written for people."""
    if path == "/metrics":
        return "\n".join(line for line in text.splitlines() if not line.startswith("# HELP"))
    try:
        value = json.loads(text)
    except ValueError:
        return text
    if path == "/openapi.json":
        return json.dumps(_without_descriptions(value), indent=0)
    if isinstance(value, dict) and isinstance(value.get("error"), dict):
        value["error"]["message"] = ""
    return json.dumps(value)


def _without_descriptions(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_descriptions(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    return {
        name: _without_descriptions(entry)
        for name, entry in value.items()
        # a field may be called so, too: then its schema is not text
        if name not in ("description", "summary", "title") or not isinstance(entry, str)
    }


def _parting(answers: Sequence[str], width: int = 240) -> tuple[str, str]:
    """Both texts from a little before their first difference."""
    first, second = answers
    pairs = enumerate(zip(first, second, strict=False))
    start = next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
    start = max(0, start - 60)
    return first[start : start + width], second[start : start + width]


@contextmanager
def server(place: str, flags: str) -> Generator[str, None, None]:
    """The address of a server: a URL as it is, or of a checkout that is served meanwhile."""
    if place.startswith(("http://", "https://")):
        yield place.rstrip("/")
        return
    sources = sorted(Path(place).resolve().glob("packages/*/src"))
    if not sources:
        raise SystemExit(f"{place} is neither a URL nor a checkout: it has no packages/*/src")
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", "trencadis.server", "--port", "0", *shlex.split(flags)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sources))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield _address(process)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _address(process: subprocess.Popen[str]) -> str:
    """Where a started server says that it listens. Its output is read to the end."""
    found: Queue[str | None] = Queue()
    tail: deque[str] = deque(maxlen=20)

    def read() -> None:
        for line in process.stdout or ():
            tail.append(line)
            if match := re.search(r" at (http://\S+) ", line):
                found.put(match[1])
        found.put(None)

    threading.Thread(target=read, daemon=True).start()
    try:
        address = found.get(timeout=START_SECONDS)
    except Empty:
        address = None
    if address is None:
        raise SystemExit(f"the server did not start:\n{''.join(tail)}")
    return address


def table(asks: list[Ask], differences: list[Difference], statuses: Counter[int]) -> str:
    rows = [f"{'':<22}{'requests':>9}" + "".join(f"{kind:>9}" for kind in KINDS)]
    for group, count in sorted(Counter(ask.group for ask in asks).items()):
        found = Counter(item.kind for item in differences if item.ask.group == group)
        rows.append(f"{group:<22}{count:>9}" + "".join(f"{found[kind]:>9}" for kind in KINDS))
    found = Counter(item.kind for item in differences)
    rows.append(f"{'in all':<22}{len(asks):>9}" + "".join(f"{found[kind]:>9}" for kind in KINDS))
    answered = ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items()))
    return "\n".join([*rows, f"A answered {answered}"])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("first", metavar="A", help="a URL, or a checkout to serve")
    parser.add_argument("second", metavar="B", help="another")
    parser.add_argument("--requests", type=int, default=200, metavar="N", help="default: 200")
    parser.add_argument("--seed", type=int, default=0, help="of the mix (default: 0)")
    parser.add_argument("--max-tokens", type=int, default=8, help="longest answer (default: 8)")
    parser.add_argument("--flags", default=FLAGS, help="of the servers that are started")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the servers as well
    with ExitStack() as stack:
        clients = [
            stack.enter_context(httpx.Client(base_url=address, timeout=300))
            for address in [
                stack.enter_context(server(place, args.flags))
                for place in (args.first, args.second)
            ]
        ]
        model = clients[0].get("/v1/models").json()["data"][0]["id"]
        asks = requests(args.requests, args.seed, model, args.max_tokens)
        differences, statuses = [], Counter[int]()
        for number, ask in enumerate(asks):
            if number % 20 == 0:
                print(f"{number} of {len(asks)} requests sent", file=sys.stderr)
            answers = [
                client.request(ask.method, ask.path, content=ask.body, headers=ask.headers)
                for client in clients
            ]
            statuses[answers[0].status_code] += 1
            difference = compare(ask, *answers)
            if difference is not None:
                differences.append(difference)
                print(f"{difference}\n", flush=True)
    print(table(asks, differences, statuses))
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
