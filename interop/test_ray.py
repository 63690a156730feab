"""An application of Ray Serve with two replicas: ``nox -s "interop(ray)"``.

``INTEROP_MODEL`` is the directory of the small model.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

ray = pytest.importorskip("ray")

from ray import serve  # noqa: E402
from ray.serve.config import AutoscalingContext  # noqa: E402

from trencadis.engine import LLM, ConfigError, EngineStats, SamplingParams  # noqa: E402
from trencadis.server.ray import (  # noqa: E402
    POLICY,
    TARGET_LOAD,
    build_app,
    load_of,
    replicas_by_load,
)
from trencadis.server.ray_front import MAX_PROMPT_CHARS, model_in, prompt_text  # noqa: E402

MODEL = os.environ.get("INTEROP_MODEL", "")
SETTINGS = {
    "model": MODEL,
    "served-model-name": "small",
    "dtype": "float32",
    "max-num-seqs": 8,
    "max-model-len": 256,
    "warmup": "none",
    "api-key": "key",
}
REPLICA = {"ray_actor_options": {"num_cpus": 1}, "health_check_period_s": 1}
HEADERS = {"Authorization": "Bearer key"}
LIMIT_S = 120.0

HONEST = (500, 502, 503)
"""Status codes with which Ray answers a request whose replica is gone."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The address of a cluster on this machine, which starts an application where it is asked."""
    if not MODEL:
        pytest.skip("INTEROP_MODEL names no model")
    # `metrics_of_replicas` tells processes apart by their start, which would be of one moment.
    os.environ["RAY_worker_maximum_startup_concurrency"] = "1"  # noqa: SIM112 - Ray's spelling
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    port = random.randrange(20000, 40000)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """What an engine without Ray answers to 200 prompts."""
    llm = LLM(MODEL, dtype="float32", max_model_len=256, warmup="none")
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    answers = llm.generate([prompt(number) for number in range(200)], params)
    return [list(answer.completions[0].token_ids) for answer in answers]


def run(settings: dict[str, Any], **deployment: Any) -> None:
    serve.run(build_app({**settings, "deployment": {**REPLICA, **deployment}}), name="llm")


def processes(of: str) -> list[int]:
    """The processes whose command line contains this."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if of in command and state != "Z":
            found.append(int(entry.name))
    return found


def replicas() -> list[int]:
    return [
        pid
        for name in ("EngineReplica", "RoutedReplica")
        for pid in processes(f"ray::ServeReplica:llm:{name}")
    ]


def wait_until(condition: Any) -> None:
    ends = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.2)


def prompt(number: int) -> list[int]:
    return random.Random(number).choices(range(1000, 9000), k=5 + number % 40)


def ask(url: str, number: int) -> list[int] | int:
    """The streamed tokens of a request, or the status of an error."""
    body = {
        "model": "small",
        "prompt": prompt(number),
        "max_tokens": 16,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    tokens: list[int] = []
    done = False
    try:
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body, headers=HEADERS, timeout=LIMIT_S
        ) as response:
            if response.status_code != 200:
                return response.status_code
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    done = True
                elif data:
                    tokens += json.loads(data)["choices"][0].get("token_ids") or []
    except httpx.HTTPError:  # the connection ends in the middle of a stream
        return 502
    return tokens if done else 502


@pytest.mark.parametrize("front", [{}, {"front": {}}], ids=["proxies", "front"])
def test_a_replica_that_is_killed_costs_its_own_requests_alone(
    url: str, expected: list[list[int]], front: dict[str, Any]
) -> None:
    run({**SETTINGS, **front}, num_replicas=2)
    first = replicas()
    assert len(first) == 2
    with ThreadPoolExecutor(16) as pool:
        asked = [pool.submit(ask, url, number) for number in range(200)]
        wait_until(lambda: sum(each.done() for each in asked) > 60)
        os.kill(first[0], signal.SIGKILL)
        answers = [each.result() for each in asked]
    failed = [answer for answer in answers if isinstance(answer, int)]
    right = [answer == tokens for answer, tokens in zip(answers, expected, strict=True)]
    print(f"{sum(right)} right, {len(failed)} errors of the killed replica")
    assert set(failed) <= set(HONEST)
    assert len(failed) <= 2 * 2 * SETTINGS["max-num-seqs"]  # what one replica may have
    assert sum(right) == 200 - len(failed)
    wait_until(lambda: len(replicas()) == 2 and first[0] not in replicas())
    wait_until(lambda: ask(url, 0) == expected[0])
    serve.delete("llm")
    wait_until(lambda: not processes("ray::ServeReplica:llm"))
    wait_until(lambda: not processes("trencadis.engine.core"))


def test_an_engine_that_has_failed_is_replaced(url: str) -> None:
    run({**SETTINGS, "engine-restarts": 0}, num_replicas=1)
    (first,) = replicas()
    cores = [pid for pid in children(first) if "python" in Path(f"/proc/{pid}/exe").readlink().name]
    assert cores
    for core in cores:
        os.kill(core, signal.SIGKILL)
    wait_until(lambda: replicas() and first not in replicas())
    wait_until(lambda: isinstance(ask(url, 1), list))
    serve.delete("llm")


def children(parent: int) -> list[int]:
    tasks = Path(f"/proc/{parent}/task").glob("*/children")
    direct = [int(pid) for task in tasks for pid in task.read_text().split()]
    return [*direct, *(each for pid in direct for each in children(pid))]


@contextmanager
def fronted(settings: dict[str, Any]) -> Iterator[None]:
    run({**settings, "front": {}}, num_replicas=2)
    try:
        yield
    finally:
        serve.delete("llm")
        wait_until(lambda: not processes("ray::ServeReplica:llm"))


def metrics_of_replicas(url: str) -> list[dict[str, float]]:
    """The samples of each of two replicas, which answer in no fixed order."""
    pages: dict[float, dict[str, float]] = {}
    ends = time.monotonic() + LIMIT_S
    while len(pages) < 2:
        assert time.monotonic() < ends
        lines = httpx.get(f"{url}/metrics", headers=HEADERS, timeout=LIMIT_S).text.splitlines()
        samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        page = {name: float(value) for name, _, value in samples}
        pages[page["process_start_time_seconds"]] = page
    return list(pages.values())


def total(url: str, prefix: str) -> float:
    pages = metrics_of_replicas(url)
    return sum(value for page in pages for name, value in page.items() if name.startswith(prefix))


def test_behind_a_front_every_turn_of_a_conversation_finds_its_prefix(url: str) -> None:
    body = {"model": "small", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    said: dict[int, list[int]] = {user: [] for user in range(6)}
    with fronted({**SETTINGS, "max-model-len": 512}):
        for turn in range(4):
            for user, earlier in said.items():
                new = random.Random(f"{user} {turn}").choices(range(1000, 9000), k=64)
                sent = {**body, "prompt": [*earlier, *new], "return_token_ids": True}
                answer = httpx.post(
                    f"{url}/v1/completions", json=sent, headers=HEADERS, timeout=LIMIT_S
                ).json()
                cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert cached == max(0, len(earlier) - 1) // 32 * 32  # full blocks
                earlier += [*new, *answer["choices"][0]["token_ids"]]
        served = [
            page_total(page, "vllm:request_success_total") for page in metrics_of_replicas(url)
        ]
        assert min(served) > 0, "one replica has served all"


def page_total(page: dict[str, float], prefix: str) -> float:
    return sum(value for name, value in page.items() if name.startswith(prefix))


def test_a_front_passes_errors_limits_and_the_end_of_clients(url: str) -> None:
    body = {"model": "small", "prompt": "hello", "ignore_eos": True, "stream": True}
    with fronted({**SETTINGS, "max-model-len": 4096, "max-body-size": 20_000}):

        def status(**request: Any) -> int:
            given = {"headers": HEADERS, **request}
            return httpx.post(f"{url}/v1/completions", timeout=LIMIT_S, **given).status_code

        assert status(json=body, headers={}) == 401
        as_json = {**HEADERS, "Content-Type": "application/json"}
        assert status(content=b"{", headers=as_json) == 400
        assert status(content=b"[1]", headers=as_json) == 400
        assert status(json={**body, "model": "other"}) == 404
        assert status(json={**body, "prompt": "long " * 8000}) == 413
        assert status(json={**body, "prompt": ["a", "b"], "max_tokens": 2}) == 200
        assert httpx.get(f"{url}/v1/models", headers=HEADERS, timeout=LIMIT_S).status_code == 200
        endless = {**body, "max_tokens": 4000}
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=endless, headers=HEADERS, timeout=LIMIT_S
        ) as stream:
            next(stream.iter_lines())
        wait_until(lambda: total(url, "vllm:num_requests_running") == 0)
        assert total(url, "vllm:generation_tokens_total") < 4000


def test_behind_a_front_each_model_has_its_replica(url: str, tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    models = {name: {"model": MODEL} for name in ("first", "second")}
    file.write_text(yaml.safe_dump({"models": models}))
    settings = {
        name: value
        for name, value in SETTINGS.items()
        if name not in ("model", "served-model-name")
    }
    settings |= {"multi-model-config": str(file), "auto-switch": True}
    with fronted(settings):

        def send(model: str) -> None:
            body = {"model": model, "prompt": "hello", "max_tokens": 2}
            url_ = f"{url}/v1/completions"
            answer = httpx.post(url_, json=body, headers=HEADERS, timeout=LIMIT_S)
            assert (answer.status_code, answer.json()["model"]) == (200, model)

        for _ in range(2):
            for model in models:
                send(model)
                time.sleep(2)  # Ray tells its routers of models once a second
        settled = total(url, "trencadis:model_switches_total")
        for _ in range(8):
            for model in models:
                send(model)
        assert total(url, "trencadis:model_switches_total") == settled


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"prompt": "hello"}, "hello"),
        ({"prompt": [72, 105]}, "Hi"),
        ({"prompt": [["a"], "b"]}, "ab"),
        ({"prompt": [0xD800 + 65]}, "A"),  # no text has a surrogate
        ({"prompt": "\ud800x"}, "?x"),
        ({"messages": [{"role": "user", "content": "a"}, {"content": [{"text": "b"}]}]}, "ab"),
        ({"system": "s", "messages": [{"content": "a"}]}, "sa"),
        ({"instructions": "s", "input": [{"content": "a"}]}, "sa"),
        ({"messages": 7, "prompt": {"a": 1}}, ""),
        ({"prompt": [[[[[[[["deep"]]]]]]]]}, ""),
        ({"prompt": "x" * 100_000}, "x" * MAX_PROMPT_CHARS),
        ({}, ""),
    ],
)
def test_the_prompt_by_which_a_front_routes(fields: dict[str, Any], text: str) -> None:
    assert prompt_text(fields) == text
    text.encode()


@pytest.mark.parametrize(("named", "found"), [("a", "a"), ("c", None), ([], None), (None, None)])
def test_the_model_by_which_a_front_routes(named: Any, found: str | None) -> None:
    assert model_in({"model": named}, frozenset("ab")) == found


def test_load_adds_a_replica(url: str) -> None:
    scaling = {
        "min_replicas": 1,
        "max_replicas": 2,
        "upscale_delay_s": 0.5,
        "look_back_period_s": 10.5,
    }
    run(SETTINGS, autoscaling_config=scaling)
    assert len(replicas()) == 1
    with ThreadPoolExecutor(16) as pool:
        ends = time.monotonic() + LIMIT_S
        number = 0
        while len(replicas()) < 2:
            assert time.monotonic() < ends
            list(pool.map(lambda n: ask(url, n), range(number, number + 32)))
            number += 32
    serve.delete("llm")


def test_the_policy_of_the_number_of_replicas() -> None:
    def context(loads: dict[str, float], current: int) -> AutoscalingContext:
        values: dict[str, Any] = dict.fromkeys(
            list(inspect.signature(AutoscalingContext).parameters)
        )
        values |= {"current_num_replicas": current, "target_num_replicas": current}
        return AutoscalingContext(**{**values, "aggregated_metrics": {"load": loads}})

    assert replicas_by_load(context({}, 3))[0] == 3
    assert replicas_by_load(context({"a": 0.0, "b": 0.0}, 2))[0] == 0
    assert replicas_by_load(context({"a": TARGET_LOAD, "b": TARGET_LOAD}, 2))[0] == 2
    assert replicas_by_load(context({"a": 1.0, "b": 1.0}, 2))[0] == 3
    assert replicas_by_load(context({"a": 3.0}, 2))[0] == 6  # the other one is not measured yet


def test_the_load_of_an_engine() -> None:
    assert load_of(EngineStats(max_num_seqs=8, num_running_seqs=4, num_waiting_reqs=8)) == 1.5
    full = EngineStats(max_num_seqs=8, num_total_blocks=10, num_used_blocks=9)
    assert load_of(full) == 0.9


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"port": 8000}, "port is a setting of what listens, which is Ray: leave it out"),
        ({"uds": "server.sock"}, "uds is a setting of what listens"),
        ({"ssl_certfile": "cert.pem"}, "ssl-certfile is a setting of what listens"),
        ({"batch-directory": "batches"}, "batch-directory is a setting of a single server"),
        ({"max-num-seqs": 0}, "max_num_seqs must be an integer from 1"),
        ({"max-num-seq": 4}, "did you mean --max-num-seqs"),
        ({"deployment": "two"}, "deployment must be options of a deployment"),
        ({"front": True}, "front must be options of a deployment"),
    ],
)
def test_bad_settings_are_errors_before_anything_starts(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_app({"model": MODEL, **settings})


def test_settings_are_those_of_the_command() -> None:
    app = build_app(
        {
            "model": MODEL,
            "max_num_seqs": "16",
            "enable-auto-tool-choice": True,
            "enable-prefix-caching": False,
            "default-chat-template-kwargs": {"enable_thinking": False},
            "tool-call-parser": "hermes",
            "deployment": {"num_replicas": 3},
        }
    )
    deployment = app._bound_deployment
    config, settings = deployment.init_args
    assert (config.max_num_seqs, config.enable_prefix_caching) == (16, False)
    assert (settings.tool_call_parser, settings.enable_auto_tool_choice) == ("hermes", True)
    assert (deployment.num_replicas, deployment.max_ongoing_requests) == (3, 32)


def test_the_file_for_a_cluster_is_an_application() -> None:
    file = Path(__file__).parents[1] / "deploy" / "ray" / "serve.yaml"
    (application,) = yaml.safe_load(file.read_text())["applications"]
    assert application["import_path"] == f"{build_app.__module__}:{build_app.__name__}"
    deployment = build_app({**application["args"], "model": MODEL})._bound_deployment
    config, _ = deployment.init_args
    assert config.max_num_seqs == 64
    scaling = deployment._deployment_config.autoscaling_config
    assert (scaling.max_replicas, scaling.policy.policy_function) == (4, POLICY)
