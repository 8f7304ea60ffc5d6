"""The report in a real browser: figures can be read, nothing is asked of the network, it fits."""

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from harness.results.records import Run, TelemetrySeries
from harness.results.store import ResultsStore
from plugins.nightly.archive import Archive
from plugins.nightly.night import Night, NightFailure, Regression, judge_night
from reports import content, html_file, page, site_folder
from tests.harness.results.places import write_runs
from tests.reports import lab
from tests.reports.conftest import (
    START,
    MakeStore,
    Sample,
    emulator_runs,
    html_of,
    mixed_runs,
    perplexity,
    speeds,
)
from tools import screenshots

pytestmark = pytest.mark.first
Load = Callable[..., str]
HOSTILE = (
    "\n</pre><script>document.title='owned'</script><img src='http://127.0.0.1:9/x.png' "
    "onerror=\"document.title='owned'\"> <b>bold</b> &amp; \u202e\x00"
)


@pytest.fixture
def load(browser: Chrome, make_store: MakeStore, tmp_path: Path) -> Load:
    """Writes a report of the runs, and of what a store has besides; opens it, gives its address."""

    def write_and_open(
        runs: Sequence[Run], fill: Callable[[ResultsStore], None] | None = None
    ) -> str:
        path, html = tmp_path / "report.html", ""
        if fill is None:
            html = html_of(runs)
        else:
            database = make_store(runs)
            with ResultsStore.open(database) as store:
                fill(store)
            html = html_file.render(page.compose(page.load(str(database))), START)
        html_file.write(html, path)
        browser.get("about:blank")
        for log in ("browser", "performance"):
            browser.get_log(log)  # type: ignore[no-untyped-call]
        browser.get(path.as_uri())
        # On a busy machine it has come back with a part of a page.
        loaded = "return document.readyState === 'complete' && location.href === arguments[0]"
        WebDriverWait(browser, 200).until(lambda b: b.execute_script(loaded, path.as_uri()))
        return path.as_uri()

    return write_and_open


def add_sessions(store: ResultsStore) -> None:
    """Add a cell's sessions, with telemetry."""
    lab.add_telemetry(store, lab.sessions())


def complaints(browser: Chrome) -> list[Any]:
    return list(browser.get_log("browser"))  # type: ignore[no-untyped-call]


def requests(browser: Chrome) -> set[str]:
    """Addresses that were requested, without those that the policy blocked or that are data."""
    entries = browser.get_log("performance")  # type: ignore[no-untyped-call]
    messages = [json.loads(entry["message"])["message"] for entry in entries]
    asked = {
        message["params"]["requestId"]: message["params"]["request"]["url"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
        and not message["params"]["request"]["url"].startswith("data:")  # nothing is fetched
    }
    blocked = {
        message["params"]["requestId"]
        for message in messages
        if message["method"] == "Network.loadingFailed"
        and message["params"].get("blockedReason") == "csp"
    }
    # The browser loads pages and pictures of its own, such as its start page's, now or later.
    schemes = ("chrome://", "chrome-untrusted://")
    own = {number for number, url in asked.items() if url.startswith(schemes)}
    return {url.partition("#")[0] for number, url in asked.items() if number not in blocked | own}


def show(browser: Chrome, address: str, anchor: str) -> None:
    """Go to a page of the report, and wait for its charts."""
    browser.get(f"{address}#{anchor}")
    assert browser.execute_async_script(screenshots.DRAWN) == 0


SIDEWAYS = """
const root = document.documentElement;
return [root.scrollWidth - root.clientWidth, [...document.querySelectorAll('*')]
  .filter(e => e.scrollWidth > e.clientWidth)
  .filter(e => !e.matches('.scroll, nav ul'))  // tables of values; they take the keyboard
  .filter(e => ['auto', 'scroll'].includes(getComputedStyle(e).overflowX))
  .map(e => `${e.tagName}.${e.className}: ${e.scrollWidth} in ${e.clientWidth}`)
  .concat([...document.querySelectorAll('.table td, .table th')].filter(cell => {
    const text = document.createRange(); text.selectNodeContents(cell);
    const [own, inner] = [cell, text].map(e => e.getBoundingClientRect());
    return inner.width && (inner.left < own.left - 1 || inner.right > own.right + 1);
  }).map(cell => `${cell.tagName} ${cell.textContent.trim()}`))]
"""
"""Pixels by which the page is wider than its window; boxes and cells that are too narrow."""


def check_fit(browser: Chrome, widths: Sequence[int], addresses: Sequence[str] = ("",)) -> None:
    """See that nothing is wider than its place, in windows of these widths."""
    for width in widths:
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        for address in addresses:
            if address:
                browser.get(address)
            assert browser.execute_script(SIDEWAYS) == [0, []], (address, width)
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_figure_can_be_read(browser: Chrome, load: Load) -> None:
    address = load(emulator_runs())
    cell = browser.find_element(
        By.CSS_SELECTOR, '[data-target="SM8750:emulator"] td[data-metric="decode_tokens_per_s"]'
    )
    assert cell.is_displayed()
    assert cell.text.split() == ["17.22", "±", "0.12"]
    value = cell.get_attribute("data-value")
    assert value is not None
    assert float(value) == pytest.approx((17.21 + 17.35 + 17.11) / 3)
    reference = browser.find_element(
        By.CSS_SELECTOR, '[data-target="SM8750:emulator"] td[data-metric="perplexity_float"]'
    )
    assert reference.text.split() == ["25.480", "device", "+0.33%"]
    notice = browser.find_element(By.ID, "emulator-notice")
    assert notice.is_displayed()
    assert "Emulator speed is not hardware speed." in notice.text
    show(browser, address, f"run-{emulator_runs()[0].id}")
    chart = browser.find_element(By.CSS_SELECTOR, "article.run:target .canvas svg")
    assert chart.size["width"] > 300
    assert complaints(browser) == []
    assert requests(browser) <= {address}


@pytest.mark.variant
def test_no_part_of_the_page_scrolls_sideways(browser: Chrome, load: Load) -> None:
    """All parts at once: grades, unchecked outputs, comparisons, telemetry, conditions, gaps."""
    phone = Sample("SM8750", emulator=False, model="Llama-3.2-1B")
    uncertain = {**perplexity(17.966, 17.5, 17.9), "perplexity_error": [2.356]}
    scored = phone.run(300, "perplexity", uncertain)
    address = load((*mixed_runs(), *lab.comparison(), scored), add_sessions)
    browser.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
    for part in (".grade", "[data-output]", "[data-verdict]", ".canvas", ".conditions", "#gaps"):
        assert browser.find_elements(By.CSS_SELECTOR, part), part
    failed, heated = mixed_runs()[6].id, lab.sessions()[3].id
    pages = ("overview", "history", "curves", "runs", "compare", "devices")
    anchors = (*pages, f"run-{failed}", f"run-{heated}")
    addresses = [f"{address}#{anchor}" for anchor in anchors]
    check_fit(browser, (1100, 800, 360), addresses)  # one in each layout of style.css


def test_runs_in_one_line_fit_and_are_found(
    browser: Chrome, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content.list_runs, "__defaults__", (4,))  # of 200
    phone = Sample("SM8750", emulator=True, model="a-model-with-a-rather-long-name")
    values = speeds([999, 1000], [50, 51], [0.04, 0.04], 1310)
    runs = [phone.run(number, "bench", values) for number in range(7)]
    address = load(runs)
    browser.get(f"{address}#runs")
    browser.execute_script("document.querySelector('.brief').open = true")
    check_fit(browser, (390, 1200))
    browser.get(f"{address}#run-{runs[1].id}")
    assert browser.find_element(By.CSS_SELECTOR, "li:target").text.startswith("2026-11-20 10:30")


def test_hostile_text_names_and_logs_are_only_text(browser: Chrome, load: Load) -> None:
    """The same text wherever text from outside can be; every page is opened, and its charts."""
    runs: list[Run] = []
    for run in (*emulator_runs(), *lab.comparison()):
        data = run.model_dump()
        data["container"] |= {"model": HOSTILE, "target": HOSTILE}
        data["device"] |= dict.fromkeys(("serial", "soc", "model", "manufacturer"), HOSTILE)
        data["provenance"] |= {"host": HOSTILE, "git_commit": HOSTILE}
        data |= {"generated_text": HOSTILE}
        runs += [
            Run.model_validate(
                {
                    **data,
                    "id": f"{number:016x}{run.id[16:]}",
                    "group_id": f"{number:016x}{run.group_id[16:]}",
                    "created_at": run.created_at + timedelta(days=number),
                }
            )
            for number in range(3)
        ]
    heat = TelemetrySeries("temp_c:<img src=x>", "degC", (0.0, 1.0, 2.0), (40.0, 41.0, 39.0))

    *others, newest = sorted(runs, key=lambda run: (run.created_at, run.id))

    def fill(store: ResultsStore) -> None:
        recorder = store.begin_run(newest.model_copy(update={"status": "running"}))
        recorder.generated_text = HOSTILE
        recorder.add_artifact("<b>runner</b>.log", HOSTILE.encode(), "log")
        recorder.add_telemetry([heat], repetition=0)
        recorder.finish()

    address = load(others, fill)
    for anchor in (
        "overview",
        "history",
        "curves",
        "runs",
        "compare",
        "devices",
        f"run-{newest.id}",
    ):
        show(browser, address, anchor)
        assert browser.title != "owned"
        assert browser.find_elements(By.CSS_SELECTOR, "img, pre b, script[src]") == []
    shown = HOSTILE.replace("\0", "\ufffd").replace("\u202e", "[U+202E]")
    text = browser.find_element(By.CSS_SELECTOR, ".page:target pre.generated")
    assert text.get_attribute("textContent") == shown
    log_text = browser.find_element(By.CSS_SELECTOR, ".page:target pre.log")
    assert "<script>document.title='owned'</script>" in str(log_text.get_attribute("textContent"))
    for button in browser.find_elements(By.CSS_SELECTOR, ".page:target .tools button"):
        button.click()
    assert complaints(browser) == []
    assert requests(browser) <= {address}


def test_without_scripts_every_page_and_table_is_there(browser: Chrome, load: Load) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        address = load(mixed_runs())
        assert browser.find_element(By.CSS_SELECTOR, "#hardware table").is_displayed()
        run = f"run-{mixed_runs()[6].id}"
        for anchor in ("history", "runs", "devices", run):
            browser.get(f"{address}#{anchor}")
            assert browser.find_element(By.ID, anchor).is_displayed()
            assert not browser.find_element(By.ID, "overview").is_displayed()
        browser.find_element(By.CSS_SELECTOR, ".page:target details.values summary").click()
        assert browser.find_element(By.CSS_SELECTOR, ".page:target .scroll table").is_displayed()
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


@pytest.mark.variant
def test_figures_are_copied_as_command_csv_and_markdown(browser: Chrome, load: Load) -> None:
    run = emulator_runs()[0]
    address = load(emulator_runs())
    show(browser, address, f"run-{run.id}")
    browser.execute_script(
        "window.copied = []; navigator.clipboard.writeText = async text => { copied.push(text); };"
    )
    for button in browser.find_elements(By.CSS_SELECTOR, f"#repetitions-{run.id} .tools button"):
        button.click()
    command, csv, markdown = browser.execute_script("return window.copied")
    figure = page.run_page(run, ()).repetitions
    assert figure is not None
    assert command.endswith(f"--figure repetitions-{run.id} --format csv")
    assert csv == figure.to_csv()
    assert markdown == figure.to_markdown()


@pytest.mark.variant
def test_a_history_is_zoomed_by_buttons_and_fingers(browser: Chrome, load: Load) -> None:
    phone = Sample("SM8750", emulator=False, model="Llama-3.2-1B")
    nights = []
    for number in range(32):
        rate = (50.0 if number < 20 else 44.0) + number % 3 / 10
        values = speeds([20 * rate] * 2, [rate] * 2, [2 / rate] * 2, 1310)
        nights.append(phone.run(24 * number, "bench", values))
    metrics = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True})
    try:
        show(browser, load(nights), "history")
        lane = ".page:target .canvas svg .mark-group > g:first-child"

        def points() -> int:
            return len(browser.find_elements(By.CSS_SELECTOR, f"{lane} .mark-symbol path"))

        def touch(kind: str, *at: tuple[float, float]) -> None:
            found = [{"x": x, "y": y, "id": number} for number, (x, y) in enumerate(at)]
            message = {"type": f"touch{kind}", "touchPoints": found}
            browser.execute_cdp_cmd("Input.dispatchTouchEvent", message)

        canvas = browser.find_element(By.CSS_SELECTOR, ".page:target .canvas")
        buttons = browser.find_elements(By.CSS_SELECTOR, ".page:target .zoom button")
        everything = points()
        assert [button.is_enabled() for button in buttons] == [True, False, False, False]
        buttons[0].click()
        wait = WebDriverWait(browser, 200)
        wait.until(lambda _: points() == everything // 2)
        buttons[1].click()
        wait.until(lambda _: points() == everything)
        y = canvas.rect["y"] - browser.execute_script("return scrollY") + 60
        touch("Start", (180, y), (220, y))
        touch("Move", (120, y), (280, y))
        touch("End")
        wait.until(lambda _: points() == everything // 4)
        assert buttons[3].is_enabled()
        check_fit(browser, (390,))
    finally:
        browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert complaints(browser) == []


@pytest.mark.variant
def test_a_site_works_from_a_folder(browser: Chrome, tmp_path: Path) -> None:
    database, folder = tmp_path / "results.db", tmp_path / "site"
    with ResultsStore.open(database) as store:
        lab.add_telemetry(store, lab.sessions())
        write_runs(store, mixed_runs())
    composed = page.compose(page.load(str(database)))
    assert site_folder.write(composed, str(database), folder, datetime.now(UTC)) == 16
    assert site_folder.write(composed, str(database), folder, datetime.now(UTC)) == 0
    complaints(browser)
    browser.get((folder / "runs.html").as_uri())
    browser.find_element(By.CSS_SELECTOR, "#all-runs tbody a").click()
    assert browser.execute_async_script(screenshots.DRAWN) == 0
    assert "/runs/" in browser.current_url
    assert browser.find_elements(By.CSS_SELECTOR, ".canvas svg")
    for name in ("index", "history", "curves", "devices"):
        browser.get((folder / f"{name}.html").as_uri())
        assert browser.find_element(By.TAG_NAME, "h1").is_displayed()
    assert complaints(browser) == []


def test_the_policy_stops_what_would_slip_through(browser: Chrome, load: Load) -> None:
    address = load(emulator_runs())
    # All is said of the image once it has failed.
    failed = browser.execute_async_script(
        "const s = document.createElement('script'); s.textContent = 'document.title = 1';"
        "document.body.append(s);"
        "const i = new Image(), told = arguments[0];"
        "i.onerror = () => told(true); i.onload = () => told(false);"
        "i.src = 'http://127.0.0.1:9/x.png'; document.body.append(i);"
    )
    assert failed
    assert "owned" not in browser.title
    assert browser.title != "1"
    assert any("Content Security Policy" in entry["message"] for entry in complaints(browser))
    assert requests(browser) <= {address}


@pytest.mark.variant
def test_a_hundred_rows_are_grouped_and_filtered(browser: Chrome, load: Load) -> None:
    models, places = ("Llama-3.2-1B", "Qwen3-4B", "Phi-4-mini", "gemma-3-1b"), range(8650, 8675)
    values = speeds([999, 1000], [50, 51], [0.04, 0.04], 1310)
    runs = [
        Sample(f"SM{soc}", emulator=False, model=model).run(number, "bench", values)
        for number, (model, soc) in enumerate((m, s) for m in models for s in places)
    ]
    load(runs)

    def shown(selector: str) -> list[str]:
        found: list[str] = browser.execute_script(
            "return [...document.querySelectorAll(arguments[0])].filter(e => e.checkVisibility())"
            ".map(e => e.innerText.trim().split('\\n')[0])",
            f"#hardware {selector}",
        )
        return found

    opened = "document.querySelectorAll('#hardware details').forEach(d => { d.open = true; })"
    assert (len(shown(".matrix tr")), len(shown("tbody.row"))) == (15, 0), "three parts of a matrix"
    browser.execute_script(opened)
    assert (len(shown("tbody.row")), len(shown("tbody.group"))) == (100, 4)
    assert shown("tbody.group")[0] == "Llama-3.2-1B W8A16 (25)"
    assert len(browser.find_elements(By.CSS_SELECTOR, "#hardware tr.remarks")) == 0
    browser.find_element(By.CSS_SELECTOR, "#hardware .filter input").send_keys("qwen sm866")
    assert len(shown("tbody.row")) == 10
    assert shown("tbody.group") == ["Qwen3-4B W8A16 (10)"]
    assert shown(".filter output") == ["10 of 100"]
    browser.find_element(By.CSS_SELECTOR, "#hardware tbody.group:not([hidden]) button").click()
    assert shown("tbody.row") == []
    browser.find_element(By.CSS_SELECTOR, "#hardware option[value=place]").click()
    assert shown("tbody.group")[0] == "SM8660 (1)"
    check_fit(browser, (390, 1280))
    assert complaints(browser) == []


def test_the_index_of_nights_looks_like_a_report(browser: Chrome, tmp_path: Path) -> None:
    archive = Archive(tmp_path, "nightly")
    loss = Regression(
        id="3fa09c51d2", cause="3fa09c51d2", metric="decode_tokens_per_s", change=-0.082,
        series="head: Llama-3.2-1B W8A16, pp128+tg16 on SM8750", since="2026-11-22",
        commits=("1f0c33d9aa" * 4, "9b2d4e7710" * 4),
    )  # fmt: skip
    failure = NightFailure(cell="head/phone/bench", error="DeviceLostError", reason=HOSTILE)
    for day, wrong in ((20, {}), (21, {"failures": (failure,)}), (22, {"regressions": (loss,)})):
        began = datetime(2026, 11, day, 23, 30, tzinfo=UTC)
        night = Night.model_validate(
            {"plan": "nightly", "name": f"2026-11-{day}", "began_at": began, **wrong}
        )
        archive.save(judge_night(night, None))
    browser.get(archive.write_index(datetime(2026, 11, 23, 6, tzinfo=UTC)).as_uri())
    headline = browser.find_element(By.CSS_SELECTOR, ".headline[data-level=bad]")
    assert headline.text.split("\n")[0] == "Bad, 2026-11-22"
    assert "-8.2%" in headline.text
    assert len(browser.find_elements(By.CSS_SELECTOR, "tbody tr")) == 3
    assert browser.find_elements(By.CSS_SELECTOR, "img, script") == []
    assert "2026-11-23 06:00 UTC" in browser.find_element(By.TAG_NAME, "footer").text
    check_fit(browser, (390, 1280))
    assert complaints(browser) == []
