"""The lab's page over real sockets: what it shows, what it refuses, and who may act."""

import http.client
import json
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait
from starlette.requests import HTTPConnection

from harness.devices.spec import DeviceSpec
from harness.errors import LeaseTimeoutError
from harness.pool.pool import Pool
from harness.pool.requirement import MemberStatus, Requirement
from harness.pool.states import MemberState
from harness.results.records import Run, TelemetrySeries
from harness.results.store import ResultsStore
from plugins.lab.overview import LabHost, LivePlan, Overview
from plugins.lab.page import app
from plugins.lab.page.access import Access, is_same_origin, read_tokens
from plugins.lab.page.board import Board
from plugins.lab.page.metrics import render_metrics
from plugins.lab.page.view import View
from plugins.virtual_android import manager
from reports.errors import ReportError
from tests import command_line
from tests.plugins.lab.page_server import Client, eventually, serving
from tests.private_adb import end_servers
from tests.reports.conftest import Sample, speeds

pytestmark = pytest.mark.first
TOKEN = "0123456789abcdef-ada"
POOL = """
devices:
  - {name: alpha, type: virtual, identifier: a, soc: SM8750, tags: [bench]}
  - {name: beta, type: virtual, identifier: b, soc: SM8650}
"""
GONE = [NoSuchElementException, StaleElementReferenceException]
SAME = {"Sec-Fetch-Site": "same-origin"}
BEARER = {"Authorization": f"Bearer {TOKEN}"}
HOSTILE = "<img src=x onerror=\"document.title='owned'\">\u202e"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("lab")
    (path / "pool.yaml").write_text(POOL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QNNFARM_STATE_DIR", str(path))
        yield path
        for device in manager.list_devices():  # that the upkeep of the page's pool has started
            manager.remove(device.name)
        end_servers(path)


@pytest.fixture(scope="module")
def running() -> Run:
    sample = Sample("SM8750", emulator=False)
    return sample.run(90, "bench", {}, status="running", label=f"cell/{HOSTILE}")


@pytest.fixture(scope="module")
def lab(folder: Path, running: Run) -> Iterator[Client]:
    """The page of a lab with two devices, two nights and a run that goes on."""
    sample = Sample("SM8750", emulator=False)
    results = folder / "results.db"
    with ResultsStore.open(results) as store:
        for number in (1, 25):
            values = speeds([1200.0] * 3, [50.0] * 3, [0.1] * 3, 1310)
            store.write_run(sample.run(number, "bench", values))
        recorder = store.begin_run(running)
        recorder.add_values({"decode_tokens_per_s": 54.25})
        zone = TelemetrySeries("temp_c:cpu", "degC", (0.0, 1.0), (40.0, 51.5))
        recorder.add_telemetry([zone], repetition=0)
        (folder / "tokens").write_text(f"# people\nada {TOKEN}\n")
        (folder / "tokens").chmod(0o600)
        with serving(folder / "pool.yaml", results, Access(read_tokens(folder / "tokens"))) as lab:
            yield lab


def test_silent_connections_and_odd_forms_end_nothing(
    lab: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_SILENT_S", 0.5)
    monkeypatch.setattr(app, "_MOST_CONNECTIONS", 5)
    silent = [socket.create_connection(("127.0.0.1", lab.port), timeout=20) for _ in range(30)]
    for one in silent:
        with suppress(OSError):
            one.sendall(b"GET / HTTP/1.1\r\nHost: ")
    for one in silent:
        with closing(one), suppress(ConnectionError):
            assert one.recv(100) == b"", "it is closed"
    assert lab.get().status == 200
    fields = {f"field{number}": "x" for number in range(11)}
    assert lab.post("/sign-in", {}, **fields).status == 403
    assert lab.post("/sign-in", SAME, token="x" * 100_000).status == 403


def test_page_shows_devices_and_what_runs(lab: Client, running: Run) -> None:
    text = lab.get().text
    link = f"report/runs/{running.id}.html"
    for part in ("alpha", "beta", "decode 54.25 tokens/s", "52 °C", link, "&lt;img src=x"):
        assert part in text
    assert not any(part in text for part in ("<img", "\u202e"))  # names from elsewhere are text


def test_report_and_pages_of_runs_stand_behind_the_verdict(lab: Client, running: Run) -> None:
    report = eventually(lambda: lab.get("/report/index.html").text, "tiny_llama on SM8750")
    assert 'href="runs.html"' in report
    assert lab.get("/report/assets/style.css").headers["Content-Type"].startswith("text/css")
    assert "54.25" in lab.get(f"/report/runs/{running.id}.html").text
    assert lab.get(f"/report/runs/{'0' * 32}.html").status == 404
    assert lab.get("/report/../../etc/passwd").status == 404


@pytest.mark.timeout(120)
def test_page_changes_with_the_lab(lab: Client) -> None:
    events = lab.events()
    whole = next(events)
    assert "alpha" in str(whole["rows"])
    lab.post("/devices/alpha/drain", BEARER, reason="new cable")
    try:
        news = next(event for event in events if "new cable" in str(event))
        assert "rows" not in news, "only what changed is sent"
        assert "beta" not in str(news)
    finally:
        lab.post("/devices/alpha/undrain", BEARER)


def test_nobody_acts_without_a_token(lab: Client) -> None:
    for headers in ({}, {"Authorization": "Bearer 0123456789abcdef-eve"}, {"Cookie": "x=y"}):
        assert lab.post("/devices/beta/drain", headers, reason="mine").status == 401
    assert lab.post("/sign-in", SAME, token="0123456789abcdef-eve").status == 403
    assert "mine" not in lab.get().text


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
    ],
)
def test_no_other_site_acts_with_a_session(lab: Client, headers: Mapping[str, str]) -> None:
    session = sign_in(lab)
    assert lab.post("/devices/beta/drain", {**session, **headers}, reason="evil").status == 403
    assert lab.post("/sign-in", headers, token=TOKEN).status == 403
    assert "evil" not in lab.get().text


def sign_in(lab: Client) -> Mapping[str, str]:
    answer = lab.post("/sign-in", SAME, token=TOKEN)
    assert answer.status == 303
    cookie = answer.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    return {"Cookie": cookie.partition(";")[0]}


def test_who_signs_in_drains_a_device_under_their_name(lab: Client) -> None:
    session = sign_in(lab)
    answer = lab.post("/devices/beta/drain", session, reason="fan broke")
    assert (answer.status, answer.text) == (200, "beta is draining\n")
    text = eventually(lambda: lab.get(**session).text, "fan broke (ada)")
    assert "Undrain" in text
    answer = lab.post("/devices/beta/undrain", session)
    assert answer.text.startswith("beta is ")


def test_page_says_who_waits_and_why(lab: Client, folder: Path) -> None:
    lab.post("/devices/alpha/drain", BEARER, reason="new battery")
    ended = threading.Event()

    def wait() -> None:
        with Pool.open(folder / "pool.yaml", probe=False) as pool:
            wanted = Requirement(name="alpha")
            with suppress(LeaseTimeoutError):
                pool.acquire(wanted, purpose="a nightly bench", cancelled=ended.is_set)

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        text = eventually(lambda: lab.get().text, "1 request waiting")
        assert ": a nightly bench</b>" in text
        assert "alpha is draining (new battery (ada)) since" in text
        assert "qnnfarm_waiting_requests 1.0" in lab.get("/metrics").text
    finally:
        ended.set()
        thread.join()
        lab.post("/devices/alpha/undrain", BEARER)


def test_actions_say_why_not(lab: Client) -> None:
    assert lab.post("/devices/gamma/drain", BEARER, reason="x").status == 404
    answer = lab.post("/devices/alpha/undrain", BEARER)
    assert answer.status == 409
    assert "drained" in answer.text
    answer = lab.post("/devices/alpha/release", BEARER, token="7")
    assert answer.text == "alpha was not held by that lease any more\n"
    assert lab.post("/alerts/abcdef/acknowledge", BEARER).status == 404
    assert lab.post("/devices/alpha/explode", BEARER).status == 404
    assert lab.get("/devices/alpha/drain").status == 405
    assert lab.get(Host="evil.example").status == 400


@pytest.mark.parametrize("path", ["/", "/events", "/metrics", "/report/index.html", "/nothing"])
def test_no_page_can_be_framed_or_run_foreign_scripts(lab: Client, path: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", lab.port, timeout=200)
    with closing(connection):
        connection.request("GET", path)
        headers = connection.getresponse().headers
    policy = headers["Content-Security-Policy"].split("; ")
    assert {"default-src 'none'", "frame-ancestors 'none'"} <= set(policy)
    assert any(part.startswith("script-src 'self'") for part in policy)
    assert (headers["X-Frame-Options"], headers["X-Content-Type-Options"]) == ("DENY", "nosniff")


def test_metrics_are_what_prometheus_reads(lab: Client, running: Run) -> None:
    families = {f.name: f for f in text_string_to_metric_families(lab.get("/metrics").text)}
    states = {s.labels["state"]: s.value for s in families["qnnfarm_devices"].samples}
    assert sum(states.values()) == 2
    (speed,) = families["qnnfarm_running_tokens_per_second"].samples
    assert speed.value == 54.25
    assert speed.labels["device"] == running.device.serial
    assert speed.labels["emulator"] == "false"


def test_runs_of_one_plan_are_one_series() -> None:
    plans = [LivePlan(name, "nightly", "ada@a", datetime.now(UTC), 2, 1, 0, 0) for name in "ab"]
    host = LabHost("h1", 3, datetime.now(UTC), 1)
    board = Board(0.0, lab=Overview(tuple(plans), (host, host)))
    text = render_metrics(board).decode()
    assert 'qnnfarm_plan_cells{plan="nightly",state="waiting"} 4.0' in text
    assert 'qnnfarm_host_devices{host="h1"} 6.0' in text


def test_grafana_asks_only_for_metrics_that_there_are(lab: Client) -> None:
    dashboard = json.loads(lab.get("/grafana.json").text)
    known = {f.name for f in text_string_to_metric_families(render_metrics(Board(0.0)).decode())}
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert asked
    assert all(any(name in expression for name in known) for expression in asked)


def test_a_device_that_nobody_looked_at_is_not_absent() -> None:
    spec, reason = DeviceSpec("virtual", "alpha"), "<b>`qnnfarm pool probe` looks"
    device = MemberStatus("alpha", spec, frozenset(), MemberState.ABSENT, reason, 0.0, seen="new")
    view = View.of(Board(0.0, devices=(device,)))
    assert "1 new" in view.fragments["counts"]
    assert "absent" not in view.fragments["counts"] + view.fragments["device-0"]
    row = view.fragments["device-0"]
    assert "&lt;b&gt;<code>qnnfarm pool probe</code> looks" in row
    assert '<td data-label="SoC"></td>' in row


@pytest.mark.parametrize(
    ("content", "mode", "reason"),
    [
        ("", 0o600, "names no user"),
        ("ada short", 0o600, "line 1"),
        ("# a comment\nada\n", 0o600, "line 2"),
        ("\0" * 40, 0o600, "line 1"),
        (f"ada {TOKEN}", 0o640, "chmod 600"),
    ],
)
def test_tokens_that_cannot_be_used_are_told(
    tmp_path: Path, content: str, mode: int, reason: str
) -> None:
    path = tmp_path / "tokens"
    path.write_text(content)
    path.chmod(mode)
    with pytest.raises(ReportError, match=reason):
        read_tokens(path)


def connection(**headers: str) -> HTTPConnection:
    raw = [
        (key.lower().replace("_", "-").encode(), value.encode()) for key, value in headers.items()
    ]
    return HTTPConnection({"type": "http", "headers": raw})


def test_proxy_names_its_user() -> None:
    access = Access(proxy_header="X-Remote-User")
    assert access.user(connection(x_remote_user="ada@lab")) == "ada@lab"
    assert access.user(connection(x_remote_user="a b")) == ""
    assert access.user(connection()) == ""


def test_what_is_no_browser_is_of_no_other_site() -> None:
    assert is_same_origin(connection(host="lab:8484"))
    assert is_same_origin(connection(host="lab:8484", origin="http://lab:8484"))
    assert not is_same_origin(connection(host="lab:8484", origin="http://lab:9000"))


def test_command_serves_a_socket_for_a_proxy(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "lab.sock"
    arguments = ("--unix-socket", path, "--proxy-user", "X-Remote-User")
    with command_line.Started("serve", *arguments, cwd=folder) as server:
        try:
            assert f"serving {path}" in server.stderr.readline()
            assert path.stat().st_mode & 0o007 == 0
            with socket.socket(socket.AF_UNIX) as opened:
                opened.connect(str(path))
                opened.sendall(
                    b"POST /devices/alpha/undrain HTTP/1.1\r\nHost: lab.example\r\n"
                    b"X-Remote-User: ada\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                )
                with opened.makefile("rb") as answer:
                    assert answer.readline() == b"HTTP/1.1 409 Conflict\r\n"
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(200) == 130
    assert not path.exists()


def test_command_refuses_what_cannot_be_served(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments, words in (
            (["--port", port], "Address already in use"),
            (["--proxy-user", "X-User"], "--proxy-user needs --unix-socket"),
            (["--tokens", "nowhere"], "No such file"),
            (["--unix-socket", "/nowhere/x"], "No such file"),
        ):
            done = command_line.qnnfarm("serve", *arguments, cwd=folder)
            assert done.returncode == 2
            assert words in done.stderr
            assert done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize(
    ("size", "scheme"),
    [pytest.param((1280, 900), "light", marks=pytest.mark.variant), ((360, 800), "dark")],
)
def test_person_drains_a_device_in_a_browser(
    browser: Chrome, lab: Client, size: tuple[int, int], scheme: str
) -> None:
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(f"{lab.address}sign-in")
    browser.find_element(By.NAME, "token").send_keys(TOKEN)
    browser.find_element(By.TAG_NAME, "button").click()
    wait = WebDriverWait(browser, 200, ignored_exceptions=GONE)
    wait.until(lambda b: b.find_element(By.CSS_SELECTOR, "#device-1 [name=reason]").is_displayed())
    reason = browser.find_element(By.CSS_SELECTOR, "#device-1 [name=reason]")
    reason.send_keys(HOSTILE, Keys.ENTER)
    try:
        wait.until(lambda b: "draining" in b.find_element(By.ID, "device-1").text)
        assert "beta is draining" in browser.find_element(By.ID, "answer").text
        assert "onerror" in browser.find_element(By.ID, "device-1").text
    finally:
        lab.post("/devices/beta/undrain", BEARER)
    wait.until(lambda b: "draining" not in b.find_element(By.ID, "device-1").text)
    assert browser.title == "Lab · qnnfarm"
    width = browser.execute_script("return document.documentElement.scrollWidth")
    assert width <= size[0]
    log = browser.get_log("browser")  # type: ignore[no-untyped-call]
    assert not [entry for entry in log if entry["level"] != "DEBUG"]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_lost_connection_is_told(browser: Chrome, folder: Path) -> None:
    with serving(folder / "pool.yaml", folder / "none.db", Access()) as lab:
        browser.get(lab.address)
        wait = WebDriverWait(browser, 200, ignored_exceptions=GONE)
        wait.until(lambda b: "No results yet" in b.find_element(By.ID, "verdict").text)
        buttons = browser.find_elements(By.TAG_NAME, "button")
        assert not any(button.is_displayed() for button in buttons)  # who may not act sees none
    wait.until(lambda b: b.find_element(By.ID, "lost").is_displayed())
    browser.get_log("browser")  # type: ignore[no-untyped-call]
