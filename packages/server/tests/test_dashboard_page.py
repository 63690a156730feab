"""The page ``/dashboard`` in a browser: Debian's headless Chromium, driven by Playwright.

`.ci/run` unpacks the package ``chromium-headless-shell``; the variable `CHROMIUM` names another
browser.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import ServerProcess, save_tiny_model

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = "TRENCADIS_TEST_CHROMIUM"
NAMES = ("chromium-headless-shell", "chromium", "google-chrome")
BROWSER = os.environ.get(CHROMIUM) or next(filter(None, map(shutil.which, NAMES)), None)
KEY = "over-temperature"
LIMIT_MS = 120_000
"""Longest wait for the browser, in milliseconds."""

FIGURES = ("temperature", "running", "power", "tokens", "usage", "blocks", "prefill", "decode")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        BROWSER is None,
        reason=f"no Chromium: install Debian's chromium-headless-shell, or name one in {CHROMIUM}",
    ),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dashboard")
    lines = [f"{second},0,{76 + second % 10},{500 + 20 * (second % 10)}" for second in range(3600)]
    heat = directory / "heat.csv"
    heat.write_text("\n".join(["time_s,device,temperature_c,power_w", *lines]))
    save_tiny_model(directory / "model")
    return directory


@contextmanager
def serving(directory: Path, *flags: str, **environ: str) -> Iterator[ServerProcess]:
    server = ServerProcess(
        *(str(directory / "model"), "--dtype", "float32", "--warmup", "none"),
        *("--block-size", "8", "--num-gpu-blocks-override", "800", "--max-num-seqs", "16"),
        *("--temperature-source", f"recorded:{directory / 'heat.csv'}"),
        *("--thermal-policy", "proportional", *flags),
        environ=environ,
    )
    try:
        server.url = server.wait_for(r" at (http://\S+) ", 600)[1]
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[ServerProcess]:
    """A server with a request that runs for all of the tests."""
    with serving(directory) as server:
        stopped = threading.Event()
        traffic = threading.Thread(target=send_requests, args=(server.url, stopped))
        traffic.start()
        try:
            yield server
        finally:
            stopped.set()
            traffic.join(300)


def send_requests(url: str, stopped: threading.Event) -> None:
    body = {"prompt": ["a b c d " * 8] * 3, "max_tokens": 200, "ignore_eos": True}
    with httpx.Client(base_url=url, timeout=300) as client:
        while not stopped.is_set():
            client.post("/v1/completions", json=body)
            stopped.wait(0.2)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox"], timeout=LIMIT_MS
        )
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, url: str, **settings: Any) -> Iterator[Any]:
    """The page, which must log no error and ask no other host."""
    context = browser.new_context(**settings)
    context.set_default_timeout(LIMIT_MS)
    page = context.new_page()
    errors: list[str] = []
    page.on(
        "console", lambda message: errors.append(message.text) if message.type == "error" else None
    )
    page.on("pageerror", lambda error: errors.append(str(error)))
    hosts = set()
    page.on("request", lambda request: hosts.add(httpx.URL(request.url).netloc.decode()))
    page.goto(f"{url}/dashboard")
    try:
        yield page
        assert not errors
        assert hosts == {httpx.URL(url).netloc.decode()}
    finally:
        context.close()


def until(page: Any, script: str) -> None:
    """Wait until a script is true. Playwright's own wait needs `eval`, which the page forbids."""
    for _ in range(LIMIT_MS // 100):
        if page.evaluate(script):
            return
        page.wait_for_timeout(100)
    pytest.fail(f"{script} did not become true: {page.inner_text('body')}")


def state(page: Any) -> str:
    return page.inner_text("#state")


SHOWN = "document.querySelectorAll('#tiles div').length > 5"
LIVE = "document.querySelector('#state').textContent === 'serving'"


def test_the_page_is_live_without_an_error_or_another_host(browser: Any, server: ServerProcess):
    with opened(browser, server.url) as page:
        until(page, LIVE)
        until(page, "document.querySelector('#running-plot .line').getAttribute('d').length > 30")
        before = page.get_attribute("#temperature-plot .line", "d")
        hits = "Number(document.querySelector('#decode-text').textContent.match(/([\\d.]+)/)[1])"
        until(page, f"{hits} > 0")
        until(
            page,
            f"document.querySelector('#temperature-plot .line').getAttribute('d') !== {before!r}",
        )
        assert "800" not in page.inner_text("#state")
        assert "of 799 blocks" in page.inner_text("#blocks-text")
        until(page, "document.querySelectorAll('#blocks-plot .used').length > 0")
        assert "°C" in page.inner_text("#temperature-text")


def test_a_phone_shows_one_column_without_horizontal_scroll(browser: Any, server: ServerProcess):
    with opened(browser, server.url, viewport={"width": 360, "height": 740}) as page:
        until(page, SHOWN)
        page.click("#decode summary")
        width = "document.scrollingElement.scrollWidth"
        assert page.evaluate(width) <= 360
        lefts = {page.locator(f"#{name}").bounding_box()["x"] for name in FIGURES}
        assert len(lefts) == 1


def test_the_keyboard_reaches_every_figure_and_its_cells(browser: Any, server: ServerProcess):
    with opened(browser, server.url) as page:
        until(page, SHOWN)
        reached = []
        for _ in range(60):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("document.activeElement.id"))
            if reached[-1] in ("blocks-plot", "decode-plot"):
                until(page, "document.activeElement.parentNode.querySelector('output').textContent")
                told = page.inner_text(f"#{reached[-1].removesuffix('-plot')} output")
                page.keyboard.press("ArrowRight")
                if reached[-1] == "blocks-plot":
                    assert page.inner_text("#blocks output") != told
        assert [f"{name}-plot" for name in FIGURES] == [i for i in reached if i.endswith("-plot")][
            :8
        ]
        for name in FIGURES:
            described = page.get_attribute(f"#{name}-plot", "aria-labelledby").split()
            words = " ".join(page.inner_text(f"#{part}") for part in described)
            assert len(words) > 20, name
            page.focus(f"#{name} summary")
            page.keyboard.press("Enter")
            until(page, f"document.querySelectorAll('#{name} tbody tr').length > 0")


USAGE = {
    "phase": "decode",
    "axes": ["batch", "blocks"],
    "rows": [1],
    "columns": [1, 2, 3, 4, 5, 6],
    "is_padded": True,
    "num_buckets": [1] * 6,
    "num_warm": [1, 1, 1, 0, 0, 0],
    "num_captured": [0] * 6,
    "num_hits": [1, 40, 900, 7, 200, 900],
}
COUNTS = """[...document.querySelectorAll('#decode-plot .hit')].map((hit) => {
  const style = (node, name) => getComputedStyle(node)[name].match(/[\\d.]+/g).map(Number);
  const below = hit.previousElementSibling.classList.contains('warm') ? hit.previousElementSibling
    : document.querySelector('#decode');
  const name = below.id ? 'backgroundColor' : 'fill';
  return [style(hit, 'fill'), Number(hit.getAttribute('fill-opacity')), style(below, name),
    style(hit.nextElementSibling, 'fill')];
})"""


def luminance(colour: list[float]) -> float:
    """https://www.w3.org/TR/WCAG22/#dfn-relative-luminance"""
    parts = [part / 255 for part in colour]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_counts_of_hits_are_readable_on_each_strength(
    browser: Any, server: ServerProcess, scheme: str
):
    with opened(browser, server.url, color_scheme=scheme) as page:
        until(page, SHOWN)
        page.click("#pause")
        for most in (1, 3, 10, 50, 200, 900):
            usage = {**USAGE, "num_hits": [min(hits, most) for hits in USAGE["num_hits"]]}
            page.evaluate("(usage) => buckets[1].show(usage)", usage)
            counts = page.evaluate(COUNTS)
            assert len(counts) == 6
            for hit, strength, below, text in counts:
                blend = [h * strength + b * (1 - strength) for h, b in zip(hit, below, strict=True)]
                low, high = sorted((luminance(blend), luminance(text)))
                assert (high + 0.05) / (low + 0.05) >= 4.5


def test_a_tap_on_a_phone_tells_of_the_cell(browser: Any, server: ServerProcess):
    phone = {"viewport": {"width": 360, "height": 740}, "has_touch": True}
    with opened(browser, server.url, **phone) as page:
        until(page, "document.querySelectorAll('#blocks-plot [data-cell]').length > 20")
        page.tap("#blocks-plot [data-cell='9']")
        until(page, "document.querySelector('#blocks .cell-text').textContent")
        first = page.evaluate("blockMap.range(9)[0]")
        assert str(first) in page.inner_text("#blocks .cell-text").partition(":")[0]
        spoken = page.inner_text("#blocks output")
        page.evaluate("blockMap.map.used[9] = 0; blockMap.drawn = ''; blockMap.redraw()")
        page.evaluate("blockMap.map.used[9] = 1; blockMap.drawn = ''; blockMap.redraw()")
        assert page.inner_text("#blocks output") == spoken, "what changes is not spoken"


def test_heat_comes_first_and_old_maps_say_so(browser: Any, server: ServerProcess):
    with opened(browser, server.url) as page:
        until(page, SHOWN)
        page.click("#pause")
        show = "(changes) => { Object.assign(latest.stats.thermal, changes); show(); }"
        page.evaluate(show, {"hottest_c": 91.0, "target_temp_c": 85.0})
        assert page.inner_text("#tiles .over").split()[0] == "Temperature"
        assert page.evaluate("document.querySelector('#tiles div').className") == "over"
        assert "over target 85" in page.inner_text("#tiles .over")
        page.evaluate(show, {"hottest_c": 84.0})
        assert page.locator("#tiles .over").count() == 0
        assert "Last ten minutes" not in page.inner_text("main")
        # In one script: the next event may come before another one.
        queue = page.evaluate("() => { show(); return points.at(-1).num_waiting_reqs; }")
        assert page.inner_text("#tiles div:has(dt:text-is('Queue')) span") == str(queue)
        page.evaluate("latest.inspection_age_s = 0.5; show()")
        assert not page.inner_text("#blocks .old")
        page.evaluate("latest.inspection_age_s = 12; show()")
        assert "As of 12 s ago" in page.inner_text("#blocks .old")


@pytest.mark.parametrize(
    ("stats", "is_padded", "words"),
    [
        ((9, 31, True), False, "Warm-up: 9 of 31 buckets, 2 graphs"),
        ((9, 31, False), True, "9 of 31 buckets ready, 2 graphs; no warm-up is under way"),
        ((31, 31, False), True, "31 of 31 buckets ready, 2 graphs"),
        ((0, 31, False), False, None),
    ],
    ids=["background", "none", "full", "nothing is padded"],
)
def test_a_bar_of_the_warm_up_is_there_while_one_is_under_way(
    browser: Any, server: ServerProcess, stats: Any, is_padded: bool, words: str | None
):
    with opened(browser, server.url) as page:
        until(page, f"{SHOWN} && latest.inspection")
        page.click("#pause")
        names = ("num_ready_buckets", "num_buckets", "is_warming_up")
        changes = {**dict(zip(names, stats, strict=True)), "num_graphs": 2}
        show = """([changes, isPadded]) => {
          Object.assign(latest.stats, changes);
          latest.inspection.grids.forEach((usage) => { usage.is_padded = isPadded; });
          show();
          return [byId('warm-up'), byId('warm-up-bar')].map((node) => node.checkVisibility());
        }"""
        is_shown, has_bar = page.evaluate(show, [changes, is_padded])
        assert is_shown == (words is not None)
        assert has_bar == changes["is_warming_up"]
        if words is not None:
            assert page.text_content("#warm-up-text") == words


def test_dark_and_light_differ_and_pause_holds_the_page(browser: Any, server: ServerProcess):
    colours = set()
    for scheme in ("light", "dark"):
        with opened(browser, server.url, color_scheme=scheme, reduced_motion="reduce") as page:
            until(page, SHOWN)
            colours.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
            page.click("#pause")
            page.wait_for_timeout(300)
            before = page.inner_html("#running-plot")
            page.wait_for_timeout(2500)
            assert page.inner_html("#running-plot") == before
    assert len(colours) == 2


def test_a_page_says_that_its_server_is_silent_and_is_live_again_after_it(
    browser: Any, directory: Path
):
    with serving(directory) as server, opened(browser, server.url) as page:
        until(page, LIVE)
        page.click("#pause")  # the figures stay, the state does not
        server.process.send_signal(signal.SIGSTOP)
        until(page, "document.querySelector('#state').textContent === 'no connection'")
        assert page.title().endswith(": no connection")
        assert "no event for 15 s" in page.inner_text("#reason")
        server.process.send_signal(signal.SIGCONT)
        until(page, LIVE)
        assert page.title().endswith(": serving")
        assert page.inner_text("#age") == "paused"


@pytest.mark.parametrize("signs", [False, True])
def test_with_admin_keys_the_page_asks_for_one(browser: Any, directory: Path, signs: bool):
    flags = ("--admin-signature-window", "60", "--allowed-hosts", "127.0.0.1") if signs else ()
    with (
        serving(directory, *flags, VLLM_ADMIN_TOKEN=KEY) as server,
        opened(browser, server.url) as page,
    ):
        until(page, "document.activeElement.id === 'key'")
        assert state(page) == "needs an admin key"
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        until(page, LIVE)
        assert KEY not in page.content()
        assert KEY not in page.url


def test_a_page_says_that_the_server_has_stopped_and_does_not_delay_it(
    browser: Any, directory: Path
):
    with serving(directory, "--shutdown-timeout", "600") as server:
        context = browser.new_context()
        context.set_default_timeout(LIMIT_MS)
        page = context.new_page()
        page.goto(f"{server.url}/dashboard")
        until(page, LIVE)
        assert server.end() == 0
        until(page, "document.querySelector('#state').textContent === 'no connection'")
        context.close()
