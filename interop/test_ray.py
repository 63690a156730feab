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
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    port = random.randrange(20000, 40000)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()


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
    return processes("ray::ServeReplica:llm:EngineReplica")


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


def test_a_replica_that_is_killed_costs_its_own_requests_alone(url: str) -> None:
    llm = LLM(MODEL, dtype="float32", max_model_len=256, warmup="none")
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    expected = [
        list(answer.completions[0].token_ids)
        for answer in llm.generate([prompt(number) for number in range(200)], params)
    ]
    run(SETTINGS, num_replicas=2)
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
    wait_until(lambda: not replicas())
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
