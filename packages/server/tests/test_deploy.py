"""The files of ``deploy/``: what they name exists, and what they promise holds.

promtool and Prometheus are in Debian's package ``prometheus``.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import httpx
import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from server_process import ServerProcess, save_tiny_model, wait_until
from stand_in_engine import StandInEngine
from switching_engine import SwitchingStandIn

from trencadis.engine import EngineConfig, ThermalStats
from trencadis.engine.settings.kv_events_config import KVEventsConfig
from trencadis.server import create_app
from trencadis.server.cli import engine_config, flag_parser, server_settings
from trencadis.server.launch import ANSWER_TIMEOUT, STOP_TIMEOUT
from trencadis.server.metrics.tracing import FLUSH_SECONDS

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
RULES = DEPLOY / "prometheus" / "alerts.yml"
RULE_TESTS = DEPLOY / "prometheus" / "alerts_test.yml"

OF_PROMETHEUS = {"instance", "job", "alertname"}
"""Labels that Prometheus adds."""

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (Debian's package prometheus) is missing"
)


def load_all(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "grafana_dashboard", ROOT / "tools" / "grafana_dashboard.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def dashboard_targets() -> list[dict[str, str]]:
    panels = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())["panels"]
    return [target for panel in panels for target in panel.get("targets", ())]


def queries() -> list[str]:
    """Every query of the rules and of the dashboard, with its legend."""
    of_panels = [f"{target['expr']} {target['legendFormat']}" for target in dashboard_targets()]
    return [rule["expr"] for rule in alerts()] + of_panels


def metric_names(query: str) -> set[str]:
    return set(re.findall(r"\b(?:vllm|trencadis):\w+", query))


def label_names(query: str) -> set[str]:
    """The labels that all metrics of a query need: those that it groups by or shows."""
    shown = re.findall(r"{{\s*(?:\$labels\.)?(\w+)\s*}}", query)
    return {*listed_labels(query, "by|on"), *shown}


def listed_labels(query: str, keywords: str) -> set[str]:
    lists = ",".join(re.findall(rf"\b(?:{keywords}) \(([^)]*)\)", query))
    return {name.strip() for name in lists.split(",") if name.strip()}


def matched_labels(query: str) -> dict[str, set[str]]:
    """The labels in the braces after each metric."""
    return {
        name: set(re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"', braces))
        for name, braces in re.findall(r"\b((?:vllm|trencadis):\w+)({[^}]*})", query)
    }


async def served_labels() -> dict[str, set[str]]:
    """The labels of each series in the answer of ``/metrics``, by its name."""
    engine = SwitchingStandIn()
    engine.thermal = ThermalStats(hottest_c=70.0, power_w=400.0, target_temp_c=80.0)
    transport = httpx.ASGITransport(create_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        text = (await client.get("/metrics")).text
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


def test_every_query_names_metrics_and_labels_that_are_served() -> None:
    served = asyncio.run(served_labels())
    assert len(queries()) > 40
    for query in queries():
        names = metric_names(query)
        assert names or "up{" in query, query
        assert names <= set(served), query
        for name in names:
            assert label_names(query) <= served[name] | OF_PROMETHEUS, (query, name)
            matched = matched_labels(query).get(name, set())
            assert matched <= served[name] | OF_PROMETHEUS, (query, name)
        summed = listed_labels(query, "without")
        assert all(any(label in served[name] for name in names) for label in summed), query


def test_the_endpoint_picker_reads_metrics_that_are_served() -> None:
    """llm-d reads one series of each metric, without labels: the first with these."""
    (config,) = load_all("llm-d/endpoint-picker.yaml")
    plugins = {plugin.get("name", plugin["type"]): plugin for plugin in config["plugins"]}
    (engine,) = plugins["core-metrics-extractor"]["parameters"]["engineConfigs"]
    custom = {each["attributeKey"]: each["metricSpec"] for each in engine["customMetrics"]}
    read = {value for name, value in engine.items() if name.endswith("Spec")} | {*custom.values()}
    assert len(read) == 6
    assert read <= set(asyncio.run(served_labels()))
    assert plugins["headroom-scorer"]["parameters"]["attributeKey"] in custom
    named = [source["pluginRef"] for source in config["dataLayer"]["sources"]]
    named += [each["pluginRef"] for each in config["dataLayer"]["sources"][0]["extractors"]]
    named += [each["pluginRef"] for each in config["schedulingProfiles"][0]["plugins"]]
    assert set(named) == set(plugins) - {"single-profile-handler"}


def test_every_expression_is_promql() -> None:
    """Syntax, functions and the types of their arguments: what promtool checks of each alone."""
    tests = yaml.safe_load(RULE_TESTS.read_text())["tests"]
    of_tests = [check["expr"] for test in tests for check in test["promql_expr_test"]]
    for expression in (*[rule["expr"] for rule in alerts()], *dashboard_queries(), *of_tests):
        promql_parser.parse(expression)


def test_the_series_of_the_rules_tests_are_served() -> None:
    """An alert that is silent is silent of series, too, that nobody serves any more."""
    served = asyncio.run(served_labels())
    for test in yaml.safe_load(RULE_TESTS.read_text())["tests"]:
        for given in test["input_series"]:
            series = promql_parser.parse(given["series"])
            labels = {matcher.name for matcher in series.matchers.matchers}
            if series.name != "up":  # Prometheus' own
                assert labels <= served[series.name] | OF_PROMETHEUS, given["series"]


def test_most_metrics_are_on_the_dashboard() -> None:
    """A rename that empties the dashboard would otherwise pass as a dashboard of nothing."""
    shown = {name for target in dashboard_targets() for name in metric_names(target["expr"])}
    assert len(shown) >= 30


def test_the_dashboard_is_what_its_tool_makes() -> None:
    tool = dashboard_tool()
    assert (DEPLOY / "grafana" / "dashboard.json").read_text() == tool.text()


def test_every_alert_has_series_that_fire_it_and_series_that_do_not() -> None:
    outcomes: dict[str, set[bool]] = {rule["alert"]: set() for rule in alerts()}
    for test in yaml.safe_load(RULE_TESTS.read_text())["tests"]:
        name = test["name"].partition(":")[0]
        expected = [
            sample["labels"]
            for check in test["promql_expr_test"]
            for sample in check["exp_samples"]
        ]
        assert expected in ([], [f'{{alertname="{name}"}}'])
        outcomes[name].add(bool(expected))
    assert set(map(frozenset, outcomes.values())) == {frozenset({True, False})}


def test_every_alert_says_who_is_woken_and_what_to_do() -> None:
    for rule in alerts():
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert set(rule["annotations"]) == {"summary", "runbook"}


@needs_promtool
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", str(RULES)),
        ("test", "rules", str(RULE_TESTS)),
        ("check", "config", str(DEPLOY / "prometheus" / "prometheus.yml")),
    ],
    ids=["rules", "rule tests", "config"],
)
def test_promtool_accepts(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


SWITCH_SAMPLES = 2
"""Every so many samples another model is active: with 15 s between them every 30 s."""

OF_HISTOGRAMS = ("_bucket", "_sum", "_count")


def expanded(values: str) -> list[float]:
    """The samples of a series in promtool's notation, such as ``0+2x3 7``."""
    samples: list[float] = []
    for part in values.split():
        match = re.fullmatch(r"(-?[\d.]+)(?:([+-][\d.]+)x(\d+))?", part)
        assert match, part
        first, step, count = float(match[1]), float(match[2] or 0), int(match[3] or 0)
        samples += [first + step * number for number in range(count + 1)]
    return samples


def of_two_models(name: str, values: list[float]) -> dict[str, str]:
    """The same samples, as a server has them whose active model alternates, by model.

    A gauge is that of the active model; a counter has a series of each model, which goes on.
    """
    is_counter = name.endswith(("_total", *OF_HISTOGRAMS))
    totals, series = {"a": 0.0, "b": 0.0}, {"a": [], "b": []}
    for number, value in enumerate(values):
        active = "ab"[number // SWITCH_SAMPLES % 2]
        totals[active] += value - (values[number - 1] if number else 0)
        for model, samples in series.items():
            gauge = value if model == active else "stale"
            samples.append(str(round(totals[model], 6) if is_counter else gauge))
    return {model: " ".join(samples) for model, samples in series.items()}


def alternating(test: dict[str, Any], of_models: set[str]) -> dict[str, Any]:
    """A test of the rules, with the series of a server that goes back and forth between models."""
    inputs = []
    for given in test["input_series"]:
        name = re.match(r"[\w:]+", given["series"])[0]
        if name not in of_models or "model_name" in given["series"]:
            inputs.append(given)
            continue
        for model, values in of_two_models(name, expanded(given["values"])).items():
            series = given["series"].replace("{", f'{{model_name="{model}", ', 1)
            inputs.append({"series": series, "values": values})
    # A rule about each model may fire for both.
    checks = [
        {**check, "expr": check["expr"].replace("count by", "group by")}
        for check in test["promql_expr_test"]
    ]
    return {**test, "input_series": inputs, "promql_expr_test": checks}


@needs_promtool
def test_every_alert_fires_as_well_while_models_alternate(tmp_path: Path) -> None:
    served = asyncio.run(served_labels())
    of_models = {name for name, labels in served.items() if "model_name" in labels}
    rules = yaml.safe_load(RULE_TESTS.read_text())
    tests = [alternating(test, of_models) for test in rules["tests"]]
    assert sum('model_name="b"' in str(test) for test in tests) > len(tests) / 2
    shutil.copy(RULES, tmp_path)
    file = tmp_path / RULE_TESTS.name
    file.write_text(yaml.safe_dump({**rules, "tests": tests}))
    done = subprocess.run(
        ["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rules_of_the_prometheus_operator_are_the_same() -> None:
    monitor, rule = load_all("kubernetes/monitoring.yaml")
    assert rule["spec"]["groups"] == yaml.safe_load(RULES.read_text())["groups"]
    service, deployment = load_all("kubernetes/engine-serve.yaml")[1:]
    assert monitor["spec"]["selector"]["matchLabels"] == service["metadata"]["labels"]
    # the label of the Service that becomes the job's name, which an alert asks for
    job = service["metadata"]["labels"][monitor["spec"]["jobLabel"]]
    assert any(f'up{{job="{job}"}}' in alert["expr"] for alert in alerts())
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    assert deployment["spec"]["template"]["metadata"]["labels"] == service["spec"]["selector"]


def settings_of(arguments: list[str], environ: dict[str, str]) -> tuple[Any, EngineConfig]:
    """The settings that engine-serve has with these arguments. Exits where it would reject them."""
    args = flag_parser().parse_args(arguments)
    return server_settings(args, environ), engine_config(args, environ)


def pod() -> dict[str, Any]:
    return load_all("kubernetes/engine-serve.yaml")[2]["spec"]["template"]["spec"]


def pod_settings() -> tuple[Any, EngineConfig]:
    secret = load_all("kubernetes/engine-serve.yaml")[0]["stringData"]
    (container,) = pod()["containers"]
    return settings_of(container["args"], secret)


def test_aibrix_finds_the_pods_their_model_and_their_events() -> None:
    service, policy, deployment = load_all("aibrix/engine-serve.yaml")
    template = deployment["spec"]["template"]
    labels, (container,) = template["metadata"]["labels"], template["spec"]["containers"]
    settings, config = settings_of(container["args"], {})
    name = labels["model.aibrix.ai/name"]
    assert name == config.name == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= labels.items()
    for selector in (deployment["spec"]["selector"], policy["spec"]["podSelector"]):
        assert selector["matchLabels"].items() <= labels.items()
    events = KVEventsConfig.of(config.kv_events_config)
    assert events.publishes
    assert labels["model.aibrix.ai/kv-events-enabled"] == "true"
    # Where AIBrix subscribes; its labels are those of its pkg/constants.
    assert (events.endpoint, events.replay_endpoint) == ("tcp://*:5557", "tcp://*:5558")
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": settings.port, "kv-events": 5557, "kv-replay": 5558}
    assert labels["model.aibrix.ai/port"] == str(settings.port)
    (ingress,) = policy["spec"]["ingress"]
    assert {port["port"] for port in ingress["ports"]} == set(ports.values())
    grace_s = template["spec"]["terminationGracePeriodSeconds"]
    assert grace_s >= seconds_to_end(settings.shutdown_timeout)


def seconds_to_end(shutdown_timeout: float) -> float:
    """The most seconds from SIGTERM to the end of the process."""
    return shutdown_timeout + ANSWER_TIMEOUT + FLUSH_SECONDS + STOP_TIMEOUT


def test_the_pod_has_time_to_drain_before_it_is_killed() -> None:
    settings, _ = pod_settings()
    (container,) = pod()["containers"]
    program = container["lifecycle"]["preStop"]["exec"]["command"][-1]
    wait_s = float(re.search(r'"wait_s": (\d+)', program)[1])
    grace_s = pod()["terminationGracePeriodSeconds"]
    assert grace_s >= wait_s + seconds_to_end(settings.shutdown_timeout)


def test_the_probes_of_the_pod_are_routes_that_need_no_key() -> None:
    settings, config = pod_settings()
    (container,) = pod()["containers"]
    (port,) = container["ports"]
    assert port["containerPort"] == settings.port
    assert settings.api_keys
    probes = {name: container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}

    async def ask(path: str) -> int:
        app = create_app(StandInEngine(), attrs.evolve(settings, admin_port=None, admin_host=None))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return (await client.get(path)).status_code

    for probe in probes.values():
        assert probe["httpGet"]["port"] == port["name"]
        assert asyncio.run(ask(probe["httpGet"]["path"])) == 200
    for name in ("readiness", "liveness"):
        assert probes[name]["timeoutSeconds"] > settings.health_timeout
    # The server restarts a hung core itself: it is faster than a container that starts anew.
    patience_s = probes["liveness"]["periodSeconds"] * probes["liveness"]["failureThreshold"]
    assert patience_s > config.hang_restart_timeout - config.hang_timeout


@pytest.mark.asyncio
async def test_the_command_of_pre_stop_drains_the_server(
    serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, _ = pod_settings()
    (container,) = pod()["containers"]
    interpreter, flag, program = container["lifecycle"]["preStop"]["exec"]["command"]
    assert interpreter == "python3"
    assert f":{settings.admin_port}/" in program
    monkeypatch.setenv("VLLM_ADMIN_TOKEN", *settings.admin_keys)
    async with (
        serving(admin_keys=settings.admin_keys) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        assert (await client.get("/ready")).status_code == 200
        port = url.rpartition(":")[2]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, flag, program.replace(f":{settings.admin_port}/", f":{port}/")),
            stdout=asyncio.subprocess.PIPE,
        )
        answer, _ = await asyncio.wait_for(process.communicate(), 120)
        assert process.returncode == 0
        assert json.loads(answer) == {"draining": True, "num_active_requests": 0}
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/live")).status_code == 200


def unit() -> dict[str, str]:
    """The settings of the service, without their sections; comments and repetitions left out."""
    text = (DEPLOY / "systemd" / "engine-serve.service").read_text()
    return dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))


def test_the_service_gives_the_server_time_to_drain_and_restarts_it_after_a_failure() -> None:
    text = (DEPLOY / "systemd" / "engine-serve.env").read_text()
    environ = dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))
    command = unit()["ExecStart"].replace("${CACHE_DIRECTORY}", "/var/cache/engine-serve")
    for name in ("MODEL", "FLAGS"):
        command = command.replace(f"${name}", environ.pop(name))
    program, *arguments = shlex.split(command)
    assert Path(program).name == "engine-serve"
    settings, config = settings_of(arguments, environ)
    assert config.model
    assert settings.api_keys
    assert settings.admin_keys
    assert float(unit()["TimeoutStopSec"]) >= seconds_to_end(settings.shutdown_timeout)
    # After the last restart of the core the exit code is 1; after SIGTERM it is 0.
    assert unit()["Restart"] == "on-failure"
    # With "control-group" the core would get SIGTERM too, and end before its requests do.
    assert unit()["KillMode"] == "mixed"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_service(tmp_path: Path) -> None:
    file = tmp_path / "engine-serve.service"
    text = (DEPLOY / "systemd" / "engine-serve.service").read_text()
    file.write_text(text.replace("/opt/engine-serve/bin/engine-serve", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(file)], capture_output=True, text=True, check=False
    )
    if "Failed to" in done.stderr and "unit" not in done.stderr:
        pytest.skip(f"systemd-analyze does not work here: {done.stderr.strip()}")
    complaints = [line for line in done.stderr.splitlines() if file.name in line]
    assert not complaints


# A real Prometheus, which scrapes a server with a model.


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("server")
    heat = directory / "heat.csv"
    lines = [f"{second},0,{70 + second % 2 / 10},600" for second in range(3600)]
    heat.write_text("\n".join(["time_s,device,temperature_c,power_w", *lines]))
    models = directory / "models.yaml"
    names = {alias: str(save_tiny_model(directory / alias)) for alias in ("first", "second")}
    entries = {alias: {"model": model, "dtype": "float32"} for alias, model in names.items()}
    models.write_text(yaml.safe_dump({"default_model": "first", "models": entries}))
    server = ServerProcess(
        *("--multi-model-config", str(models), "--warmup", "none", "--admin-rate-limit", "1000"),
        *("--block-size", "8", "--num-gpu-blocks-override", "800", "--swap-space", "0.1"),
        *("--temperature-source", f"recorded:{heat}", "--thermal-policy", "proportional"),
        environ={"VLLM_SERVER_DEV_MODE": "1"},
    )
    try:
        server.url = server.wait_for(r" at (http://\S+) ", 600)[1]
        yield server
    finally:
        server.kill()


@pytest.fixture
def prometheus(server: ServerProcess, tmp_path: Path) -> Iterator[httpx.Client]:
    """Prometheus with the files of ``deploy/``, which scrapes the server twice a second."""
    target = server.url.removeprefix("http://")
    text = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
    text = text.replace("127.0.0.1:8000", target).replace("interval: 15s", "interval: 500ms")
    assert target in text
    config = tmp_path / "prometheus.yml"
    config.write_text(text)
    shutil.copy(RULES, tmp_path)
    process, url = started_prometheus(config, tmp_path / "data")
    try:
        with httpx.Client(base_url=url, timeout=60) as client:
            yield client
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)


def started_prometheus(config: Path, data: Path) -> tuple[subprocess.Popen[bytes], str]:
    """A process that is ready, and its URL. Another process may take the port first."""
    for _ in range(5):
        url = f"http://127.0.0.1:{free_port()}"
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={data}",
                f"--web.listen-address={url.removeprefix('http://')}",
            ],
            stderr=subprocess.DEVNULL,
        )
        with httpx.Client(base_url=url, timeout=10) as client:
            wait_until(partial(is_ready_or_gone, process, client))
        if process.poll() is None:
            return process, url
    pytest.fail("prometheus does not start")


def is_ready_or_gone(process: subprocess.Popen[bytes], client: httpx.Client) -> bool:
    return process.poll() is not None or answers(client, "/-/ready")


def answers(client: httpx.Client, path: str) -> bool:
    try:
        return client.get(path).status_code == 200
    except httpx.TransportError:
        return False


def send_traffic(url: str, num_requests: int) -> None:
    body = {"prompt": "a b c", "max_tokens": 40, "ignore_eos": True, "temperature": 0}

    def send(_: int) -> int:
        return httpx.post(f"{url}/v1/completions", json=body, timeout=300).status_code

    for model in ("second", "first"):
        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(send, range(num_requests))) == {200}
        switched = httpx.post(f"{url}/v1/models/switch", json={"model": model}, timeout=300)
        assert switched.status_code == 200, switched.text


def ranged(client: httpx.Client, query: str, begin_s: float) -> list[dict[str, Any]]:
    """The series of a query since ``begin_s``."""
    response = client.get(
        "/api/v1/query_range",
        params={"query": query, "start": begin_s, "end": time.time(), "step": 0.2},
    )
    assert response.status_code == 200, (query, response.text)
    result: list[dict[str, Any]] = response.json()["data"]["result"]
    return result


def health_of_rules(client: httpx.Client) -> dict[str, str]:
    groups = client.get("/api/v1/rules").json()["data"]["groups"]
    return {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}


def has_value(series: list[dict[str, Any]]) -> bool:
    """Whether there is a number at any time. A quantile of nothing is NaN."""
    return any(not math.isnan(float(value)) for each in series for _, value in each["values"])


def dashboard_queries() -> list[str]:
    """The queries of the dashboard for all servers and models, over a short interval."""
    variables = {"$__rate_interval": "4s", "$instance": ".*", "$model_name": ".*"}
    queries: list[str] = [target["expr"] for target in dashboard_targets()]
    for name, value in variables.items():
        queries = [query.replace(name, value) for query in queries]
    return queries


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="Prometheus (Debian's package) is missing"
)
def test_prometheus_has_an_answer_to_every_query_of_the_dashboard(
    server: ServerProcess, prometheus: httpx.Client
) -> None:
    begin_s = time.time()
    wait_until(lambda: ranged(prometheus, 'up{job="engine-serve"} == 1', begin_s))
    empty = dashboard_queries()
    while empty and time.time() < begin_s + 300:
        # Some panels show what runs at a scrape, and a scrape may fall between short requests.
        send_traffic(server.url, 24)
        time.sleep(1)  # for a scrape of what the last requests changed
        empty = [query for query in empty if not has_value(ranged(prometheus, query, begin_s))]
    assert not empty
    # "unknown" before the first evaluation
    wait_until(lambda: "unknown" not in health_of_rules(prometheus).values())
    assert health_of_rules(prometheus) == {rule["alert"]: "ok" for rule in alerts()}
    firing = prometheus.get("/api/v1/alerts").json()["data"]["alerts"]
    assert {alert["labels"]["alertname"] for alert in firing} <= {"EngineCompilesInTraffic"}
