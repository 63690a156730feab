"""README and pages: protocols, fields, routes, orders and metrics are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import attrs
from openai.types.chat import completion_create_params as chat_params
from openai.types.completion_create_params import CompletionCreateParamsBase
from switching_engine import SwitchingStandIn
from typing_extensions import is_protocol

import trencadis.engine
import trencadis.server
from trencadis.engine import BatchControl
from trencadis.engine.errors import ENDING_ERRORS
from trencadis.server import ServerSettings, create_app, engine_protocol
from trencadis.server.api.pooling import MAX_INPUTS
from trencadis.server.api.protocol import MAX_MESSAGES, ChatCompletionRequest, CompletionRequest
from trencadis.server.batches.batch_runner import MAX_LINES
from trencadis.server.batches.file_store import (
    MAX_FILE_BYTES,
    MAX_FILES,
    MAX_KEY_BYTES,
    MAX_UNFINISHED,
)
from trencadis.server.commands.run_batch import MAX_LINE
from trencadis.server.dashboard.feed import (
    INTERVAL_S,
    MAX_EVENTS,
    MAX_HISTORY_POINTS,
    MAX_VIEWERS,
    SLOW_S,
)
from trencadis.server.errors import as_api_error
from trencadis.server.generation import embedding_run
from trencadis.server.http import json_body
from trencadis.server.http.connections import MAX_CONNECTIONS
from trencadis.server.http.json_decoder import MAX_VALUES
from trencadis.server.metrics.metric_tables import (
    ADMISSION_REJECTIONS,
    BATCH_LINES,
    BATCHES,
    ENGINE_HISTOGRAMS,
    ENGINE_METRICS,
    KEY_METRICS,
    REQUEST_METRICS,
    REQUEST_SUCCESS,
    SWITCH_METRICS,
)
from trencadis.server.routes.batches import WINDOW_S
from trencadis.server.switching.switch_control import DRAIN_SECONDS

README = (Path(__file__).parent.parent / "README.md").read_text()
PAGES = Path(__file__).parents[3] / "docs" / "server"
API = (PAGES / "api.md").read_text()
OPERATORS = (PAGES / "operators.md").read_text()
METRICS = (PAGES / "metrics.md").read_text()


def test_a_program_can_import_every_protocol_of_an_engine():
    protocols = {
        name
        for name, value in vars(engine_protocol).items()
        if is_protocol(value) and value.__module__ == engine_protocol.__name__
    }
    assert "EmbeddingEngine" in protocols
    for name in protocols:
        assert getattr(trencadis.server, name) is getattr(engine_protocol, name)
    assert protocols <= set(trencadis.server.__all__)
    section = README.partition("## As a library")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(\w+)`", section)) >= protocols - {"ServingTokenizer"}


def test_the_page_lists_all_request_fields_that_openai_does_not_have():
    (listed,) = re.findall(r"extensions of vLLM: (.*?)\. `/docs`", API, re.DOTALL)
    extensions = set()
    for model, params in (
        (ChatCompletionRequest, chat_params.CompletionCreateParamsBase),
        (CompletionRequest, CompletionCreateParamsBase),
    ):
        extensions |= set(model.model_fields) - set(params.__annotations__) - {"stream"}
    assert set(re.findall(r"`(.*?)`", listed)) == extensions | {
        "stream_options.continuous_usage_stats"
    }


def test_the_page_lists_all_fields_of_an_order():
    section = OPERATORS.partition("## Orders")[2].partition("\n## ")[0]
    assert re.findall(r"^- `(\w+)`:", section, re.MULTILINE) == list(
        attrs.fields_dict(BatchControl)
    )


def metrics_list() -> str:
    """All metrics as the page shows them, with the names that Prometheus shows."""
    rows = [(f"{m.name}_total" if m.kind == "counter" else m.name, m.help) for m in ENGINE_METRICS]
    rows += [(metric.name, metric.help) for metric in ENGINE_HISTOGRAMS]
    rows += [(metric.name, metric.help) for metric in REQUEST_METRICS]
    rows += [(f"{name}_total", about) for name, about, _ in (REQUEST_SUCCESS, ADMISSION_REJECTIONS)]
    rows += [(f"{m.name}_total" if m.kind == "counter" else m.name, m.help) for m in SWITCH_METRICS]
    rows += [BATCHES[:2], (f"{BATCH_LINES[0]}_total", BATCH_LINES[1])]
    rows += [(f"{metric.name}_total", metric.help) for metric in KEY_METRICS]
    return "\n".join(f"- `{name}`: {about}" for name, about in dict.fromkeys(rows))


def test_the_pages_name_every_error_that_ends_a_request():
    requests = (Path(__file__).parents[3] / "docs" / "engine" / "requests.md").read_text()
    for code, error in ENDING_ERRORS.items():
        assert as_api_error(error("")).code == code, f"{error.__name__}: server/errors.py"
        assert getattr(trencadis.engine, error.__name__, None) is error, "engine/__init__.py"
        assert f"- `{error.__name__}`: " in requests, "docs/engine/requests.md"
        assert re.search(rf"^- \d.* `{code}`", API, re.MULTILINE), f"{code}: docs/server/api.md"


def of(number: float, unit: float) -> str:
    return f"{number / unit:.12g}"


LIMITS = {
    "api.md": (
        f"Most are {of(MAX_FILE_BYTES, 10**6)} MB and {MAX_LINES:,} lines of a file; "
        f"{MAX_FILES:,} files, {of(MAX_KEY_BYTES, 2**30)} GiB, {of(MAX_UNFINISHED, 4)} unfinished "
        "batches of a key",
        f"After {of(WINDOW_S, 3600)} hours",
        f"at most {MAX_MESSAGES:,} messages",
        f"body above {of(json_body._SHORT_BYTES, 1024)} KiB {MAX_VALUES:,} values",
        f"{MAX_VIEWERS} dashboards are open",
        f"up to {MAX_INPUTS:,} of them",
        f"At most {embedding_run._AT_ONCE} inputs of a request run at once",
    ),
    "operation.md": (f"Lines have at most {of(MAX_LINE, 2**20)} MiB",),
    "operators.md": (
        f"At most {MAX_VIEWERS} pages are open",
        f"its buffers have been full for {SLOW_S:g} s",
    ),
    "settings.md": (f"at most {MAX_CONNECTIONS}",),
    "switching.md": (f"still run {DRAIN_SECONDS:g} s after a switch has begun",),
}


def test_the_pages_name_the_limits():
    for page, sentences in LIMITS.items():
        text = " ".join((PAGES / page).read_text().split())
        for sentence in sentences:
            assert sentence in text, f"docs/server/{page}: {sentence}"
    assert MAX_EVENTS * INTERVAL_S == 5 * 60  # in words on the page
    assert MAX_HISTORY_POINTS * INTERVAL_S == 10 * 60


def test_the_page_lists_all_metrics():
    listed = METRICS.partition("<!-- metrics:begin -->")[2].partition("<!-- metrics:end -->")[0]
    assert listed.strip() == metrics_list()


def test_the_page_lists_every_route(tmp_path):
    """And so a router that the app does not include is noticed."""
    listed = set()
    for paths in re.findall(r"^- (`(?:GET|POST) .*?): ", API, re.MULTILINE):
        listed |= set(re.findall(r"`(?:GET |POST )?(/[^`]*)`", paths))
    settings = ServerSettings(
        server_dev_mode=True,
        enable_tokenizer_info_endpoint=True,
        batch_directory=str(tmp_path),
    )
    app = create_app(SwitchingStandIn(), settings)
    served = {re.sub(r":\w+}", "}", path) for path in app.openapi()["paths"]}
    assert (
        listed - {*("/docs", "/openapi.json", "/metrics", "/dashboard", "/v1/admin/batch")}
        <= served
    )
    assert served <= listed
