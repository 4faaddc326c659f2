"""The page at `/`: what is served and under which headers, and what a browser makes of it.

The browser tests run headless Chromium against the real ASGI application behind uvicorn, with the scripted
engine.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import shutil
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from kvsteward.engines.base import EngineLoad, Held
from kvsteward.engines.scripted import Answer, Fault, ScriptedEngine, ScriptedOptions
from kvsteward.errors import EngineUnavailableError
from kvsteward.gateway import app as app_module
from kvsteward.gateway.app import create_app
from kvsteward.gateway.dashboard import CONTENT_TYPES, PLOTLY
from kvsteward.gateway.settings import Settings, Tenant
from kvsteward.sessions import open_store

SCRIPT = "<script>document.title = 'broken'</script><img src=x onerror=\"document.title = 'broken'\">"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1400,1300",
)


class Breakable(ScriptedEngine):
    """The scripted engine, with a plug that can be pulled."""

    down = False

    async def check(self) -> None:
        if self.down:
            raise EngineUnavailableError("the plug was pulled")
        await super().check()

    async def load(self) -> EngineLoad:
        await self.check()
        return await super().load()


@dataclass(frozen=True, slots=True)
class Running:
    url: str
    engine: Breakable


@contextmanager
def gateway(settings: Settings, answers: list[str | Answer], options: ScriptedOptions) -> Iterator[Running]:
    """A gateway on a free port, in a thread with an event loop of its own."""
    engine = Breakable(options, answers=answers)
    app = create_app(settings, [engine], open_store("memory:"))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    try:
        wait(lambda: server.started, "the gateway to start")
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Running(f"http://127.0.0.1:{port}", engine)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the gateway did not stop"


def wait(true: Callable[[], Any], what: str, within_s: float = 20.0) -> Any:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        value = true()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"waited {within_s} s for {what}")


OPTIONS = ScriptedOptions(kv_bytes_per_token=1024)


@pytest.fixture
def running() -> Iterator[Running]:
    with gateway(Settings(), ["the answer"], OPTIONS) as one:
        yield one


def get(url: str, **headers: str) -> tuple[int, Any, bytes]:
    request = urllib.request.Request(url, headers={name.replace("_", "-"): value for name, value in headers.items()})
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status, response.headers, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


def say(running: Running, session: str, *texts: str, key: str = "") -> None:
    """One turn of a session."""
    body = json.dumps({"messages": [{"role": "user", "content": text} for text in texts]}).encode()
    headers = {"content-type": "application/json", "x-session-id": session, "authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{running.url}/v1/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=20) as response:
        assert response.status == 200


# -- what is served -----------------------------------------------------------------------------------------------


def test_files_types_and_headers(running: Running) -> None:
    for name, content_type in CONTENT_TYPES.items():
        path = "/" if name == "index.html" else f"/static/{name}"
        status, headers, _ = get(running.url + path)
        assert (status, headers["content-type"]) == (200, content_type)
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-cache"


def test_the_policy_lets_in_no_other_host_and_no_inline_script(running: Running) -> None:
    policy = dict(part.strip().split(" ", 1) for part in get(running.url)[1]["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["connect-src"] == policy["img-src"] == "'self'"
    assert "unsafe" not in policy["style-src"]
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"


def test_the_page_names_no_other_host(running: Running) -> None:
    for name in ("", "static/app.js", "static/style.css"):
        text = get(f"{running.url}/{name}")[2].decode()
        assert "http:" not in text and "https:" not in text
        assert "innerHTML" not in text and "insertAdjacentHTML" not in text and "document.write" not in text


def test_the_plotly_script_is_that_of_the_package(running: Running) -> None:
    package = (files("plotly") / "package_data" / PLOTLY).read_bytes()
    assert get(f"{running.url}/static/{PLOTLY}")[2] == package
    _, headers, packed = get(f"{running.url}/static/{PLOTLY}", accept_encoding="gzip")
    assert headers["content-encoding"] == "gzip"
    assert gzip.decompress(packed) == package
    ours = Path(__file__).resolve().parents[2] / "src"
    assert not list(ours.rglob("plotly*"))


def test_etags(running: Running) -> None:
    tags = set()
    for encoding in ("identity", "gzip"):
        url = f"{running.url}/static/{PLOTLY}"
        tag = get(url, accept_encoding=encoding)[1]["etag"]
        tags.add(tag)
        for sent in (tag, f"W/{tag}", f'"other", {tag}'):
            status, headers, body = get(url, accept_encoding=encoding, if_none_match=sent)
            assert (status, headers["etag"], body) == (304, tag, b"")
        assert get(url, accept_encoding=encoding, if_none_match='"other"')[0] == 200
    assert len(tags) == 2


@pytest.mark.parametrize("name", ["__init__.py", "..%2f__init__.py", "%2e%2e/settings.py", "nothing.js"])
def test_only_the_named_files_are_served(running: Running, name: str) -> None:
    status, _, body = get(f"{running.url}/static/{name}")
    assert status == 404
    assert json.loads(body)["error"]["code"] == "not_found"


def test_a_tenant_sees_only_its_own_sessions_in_the_history() -> None:
    settings = Settings(keys={"k1": Tenant("one"), "k2": Tenant("two")})
    with gateway(settings, ["the answer"], OPTIONS) as running:
        say(running, "mine", "hello", key="k1")
        say(running, "theirs", "hello", key="k2")

        def sample(key: str) -> Any:
            raw = get(f"{running.url}/v1/internal/history", authorization=f"Bearer {key}")[2]
            last = json.loads(raw)["samples"][-1]
            return last if last["other_tokens"] > 0 else None

        mine, theirs = wait(lambda: sample("k1"), "a sample"), sample("k2")
        assert set(mine["sessions"]) == {"mine"}
        assert set(theirs["sessions"]) == {"theirs"}
        assert mine["other_tokens"] == theirs["sessions"]["theirs"]
        assert mine["prompt_tokens_total"] >= mine["cached_tokens_total"] >= 0


# -- in a browser -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("chromium or chromedriver is not on PATH: run scripts/setup-browser.sh")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield opened
    finally:
        opened.quit()


@dataclass(frozen=True, slots=True)
class Page:
    """What the tests do with the page."""

    driver: Any

    def open(self, url: str, *, state: str = "live") -> None:
        self.driver.get_log("browser")
        self.driver.get(url)
        wait(lambda: self.state == state, f"the page to be {state}")

    @property
    def state(self) -> str:
        return str(self.driver.execute_script("return document.body.dataset.state"))

    def text(self, css: str) -> str:
        found: str | None = self.driver.execute_script("return document.querySelector(arguments[0])?.innerText", css)
        return found or ""

    def click(self, css: str) -> None:
        self.driver.find_element("css selector", css).click()

    def type(self, css: str, text: str) -> None:
        self.driver.find_element("css selector", css).send_keys(text)

    def traces(self) -> list[str]:
        script = "return (document.getElementById('chart-kv').data || []).map(t => t.name)"
        return list(self.driver.execute_script(script))

    def sees(self, css: str, text: str) -> None:
        wait(lambda: text in self.text(css), f"{text!r} in {css}")

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture
def page(browser: Any) -> Page:
    browser.get("about:blank")
    return Page(browser)


@pytest.mark.browser
def test_the_empty_page(running: Running, page: Page) -> None:
    page.open(running.url)
    page.sees("#empty", "No session yet")
    page.sees("#status", "Engine answers.")
    page.sees("#f-pool", "16,384")
    page.sees("#f-pool-sub", "16.0 MiB")
    wait(lambda: page.traces() == ["no session", "budget"], "the budget line")
    assert page.complaints() == []


@pytest.mark.browser
def test_a_chat_streams_and_shows_everywhere(page: Page) -> None:
    options = ScriptedOptions(decode_tokens_per_s=8.0)
    with gateway(Settings(), ["one two three four five six seven eight nine ten"], options) as running:
        page.open(running.url)
        page.click("#new-button")
        page.type("#text", "count to ten")
        page.click("#send")
        part = wait(lambda: page.text("#reply .body"), "the first words")
        assert part != "one two three four five six seven eight nine ten"
        wait(lambda: page.text("#send[disabled]") == "", "the end of the answer")
        page.sees("#messages [data-role=assistant] .body", "one two three four five six seven eight nine ten")
        page.sees("#rows .name", "count to ten")
        wait(lambda: "count to ten" in page.traces(), "the session's area")
        page.sees("#legend", "count to ten")
        wait(lambda: page.text("#rows [data-label=Turns]").endswith("1"), "the turn in the list")
        assert page.driver.execute_script("return document.getElementById('text').value") == ""
        page.type("#text", "again")
        page.click("#send")
        wait(lambda: page.text("#rows [data-label=Turns]").endswith("2"), "the second turn in the same session")
        assert len(page.driver.find_elements("css selector", "#rows tr")) == 1
        assert page.complaints() == []


@pytest.mark.browser
def test_what_a_session_has_in_the_engine_is_shown_where_the_engine_says_it(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "_HELD_EVERY", 1)
    with gateway(Settings(), ["ok"], OPTIONS) as running:
        body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "session_id": "s"}).encode()
        request = urllib.request.Request(running.url + "/v1/chat/completions", body)
        urllib.request.urlopen(request, timeout=20).close()
        page.open(running.url)
        page.sees("#rows .name", "hi")
        cell = page.driver.find_element("css selector", "#rows .held")
        assert not cell.is_displayed(), "while nobody says it"

        async def held() -> Held:
            return Held({"s": (3, 4800)}, 3, 4800)

        running.engine.held = held
        page.sees("#rows .held", "4,800")
        assert cell.is_displayed()
        page.click("#rows .pick")
        page.sees("#detail-sub", "scripted, 3 idle blocks")
        assert page.complaints() == []


@pytest.mark.browser
def test_abort_keeps_what_was_said(page: Page) -> None:
    with gateway(Settings(), ["word " * 400], ScriptedOptions(decode_tokens_per_s=20.0)) as running:
        page.open(running.url)
        page.click("#new-button")
        page.type("#text", "go on forever")
        page.click("#send")
        wait(lambda: page.text("#reply .body"), "the first words")
        page.click("#abort")
        page.sees("#messages", "abandoned")
        page.sees("#messages [data-role=assistant] .body", "word")
        wait(lambda: page.text("#f-queue") == "0 / 0", "the engine to be free")
        assert page.text("#problem") == ""


@pytest.mark.browser
def test_markup_in_a_session_is_text(running: Running, page: Page) -> None:
    say(running, SCRIPT, SCRIPT)
    page.open(running.url)
    page.sees("#rows .name", "<script>")
    page.click("#rows .pick")
    page.sees("#messages .body", SCRIPT)
    wait(lambda: any("&lt;script&gt;" in name for name in page.traces()), "the session's area")
    page.click("#tab-view")
    page.sees("#messages .body", SCRIPT)
    page.click("#tab-log")
    page.click("#messages .meta a")
    page.sees("#item-text", "<script>")
    page.click("#item-close")
    assert page.driver.title == "kvsteward"
    assert page.driver.find_elements("css selector", "#rows img, #messages img, #messages script, #legend img") == []
    assert page.complaints() == []


@pytest.mark.browser
def test_a_compaction_shows_in_log_and_view(page: Page) -> None:
    with gateway(Settings(budget_tokens=600), ["the answer"], OPTIONS) as running:
        texts = [f"Message {n}: " + "the pump of line four stands still again. " * 10 for n in range(8)]
        history: list[dict[str, str]] = []
        for text in texts:
            history.append({"role": "user", "content": text})
            body = json.dumps({"messages": history, "max_tokens": 16}).encode()
            request = urllib.request.Request(
                f"{running.url}/v1/chat/completions", body, {"x-session-id": "long", "content-type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=20) as response:
                history.append(json.load(response)["choices"][0]["message"])
        page.open(running.url)
        page.click("#rows .pick")
        wait(lambda: page.driver.find_elements("css selector", "[data-fate=condensed]"), "a condensed message")
        assert page.driver.find_elements("css selector", "#messages article[data-fate=verbatim]")
        assert len(page.driver.find_elements("css selector", "#messages article")) == 16
        link = page.driver.find_element("css selector", "#messages .meta a").get_attribute("href")
        assert get(link)[0] == 200
        page.click("#tab-view")
        page.sees("#tab-note", "what the model sees")
        page.sees("#messages article:first-child", "more in the log")
        named = page.driver.find_element("css selector", "#messages .body a").get_attribute("href")
        assert get(named)[0] == 200
        assert len(page.driver.find_elements("css selector", "#messages article")) < 16


@pytest.mark.browser
def test_an_error_comes_with_its_hint(running: Running, page: Page) -> None:
    running.engine.inject(Fault(refuse=True))
    page.open(running.url)
    page.click("#new-button")
    page.type("#text", "will fail")
    page.click("#send")
    page.sees("#problem", "Check that the engine runs")
    assert page.driver.execute_script("return document.getElementById('text').value") == "will fail"
    page.click("#send")
    page.sees("#messages [data-role=assistant] .body", "the answer")
    assert page.text("#problem") == ""


@pytest.mark.browser
def test_the_engine_is_down_and_comes_back(running: Running, page: Page) -> None:
    page.open(running.url)
    running.engine.down = True
    page.sees("#status[data-level=bad]", "the plug was pulled")
    running.engine.down = False
    page.sees("#status[data-level=ok]", "Engine answers.")


@pytest.mark.browser
def test_a_hidden_tab_asks_nothing(running: Running, page: Page) -> None:
    def asked() -> int:
        return int(page.driver.execute_script("return performance.getEntriesByType('resource').length"))

    def hide(hidden: bool) -> None:
        script = "Object.defineProperty(document, 'hidden', {value: arguments[0], configurable: true});"
        page.driver.execute_script(script + "document.dispatchEvent(new Event('visibilitychange'))", hidden)

    page.open(running.url)
    hide(True)
    time.sleep(0.5)  # what was under way comes to its end
    before = asked()
    time.sleep(2.5)
    assert asked() == before
    hide(False)
    wait(lambda: asked() > before, "the page to ask again", within_s=3.0)


@pytest.mark.browser
def test_the_gateway_is_gone(page: Page) -> None:
    with gateway(Settings(), ["the answer"], OPTIONS) as running:
        page.open(running.url)
    page.sees("#status[data-level=bad]", "The gateway does not answer. Figures are from")
    assert page.state == "stale"


@pytest.mark.browser
def test_the_key_is_asked_for_and_used(page: Page) -> None:
    with gateway(Settings(keys={"right-key": Tenant("one")}), ["the answer"], OPTIONS) as running:
        page.open(running.url, state="stale")
        page.sees("#status", "An API key is needed.")
        page.type("#key", "wrong-key\n")
        page.sees("#key-why", "not known")
        wait(lambda: page.driver.find_elements("css selector", "#key-dialog[open]"), "the dialog again")
        page.type("#key", "right-key\n")
        page.sees("#status", "Engine answers.")
        page.click("#new-button")
        page.type("#text", "hello\n")
        page.sees("#messages [data-role=assistant] .body", "the answer")
        assert page.driver.execute_script("return [sessionStorage.length, localStorage.length]") == [1, 0]


@pytest.mark.browser
def test_two_hundred_sessions(page: Page) -> None:
    options = ScriptedOptions(kv_capacity_tokens=262_144)
    with gateway(Settings(), ["the answer"], options) as running:
        for number in range(200):
            say(running, f"session-{number:03}", f"question {number} " + "word " * number)
        page.open(running.url)
        wait(lambda: len(page.driver.find_elements("css selector", "#rows tr")) == 200, "all rows")
        wait(lambda: len(page.traces()) == 12 and page.traces()[-2:] == ["other", "budget"], "ten areas and the rest")
        page.sees("#sessions-count", "200")
        assert page.complaints() == []
