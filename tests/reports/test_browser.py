"""The report in a real browser: figures can be read, nothing is asked of the network, it fits."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

from harness.results.records import Run
from harness.results.store import ResultsStore
from reports import html_file, page
from reports.page import MOST_IN_FULL
from tests.reports import lab
from tests.reports.conftest import Sample, speeds
from tests.system import program

MakeStore = Callable[[Sequence[Run]], Path]
Samples = Mapping[str, list[Run]]
HOSTILE = (
    "\n</pre><script>document.title='owned'</script><img src='http://127.0.0.1:9/x.png' "
    "onerror=\"document.title='owned'\"> <b>bold</b> &amp; \u202e\x00"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    options = ChromeOptions()
    options.binary_location = str(program("chromium"))
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    for argument in (
        "headless",
        "disable-gpu",
        "disable-dev-shm-usage",
        "no-first-run",
        "disable-background-networking",
        "disable-component-update",
        "disable-sync",
        f"user-data-dir={tmp_path_factory.mktemp('chromium')}",
        *(("no-sandbox",) if os.geteuid() == 0 else ()),
    ):
        options.add_argument(f"--{argument}")
    driver = Chrome(options=options, service=Service(str(program("chromedriver"))))
    try:
        driver.set_page_load_timeout(250)
        driver.set_script_timeout(250)
        yield driver
    finally:
        driver.quit()


@pytest.fixture
def load(browser: Chrome, make_store: MakeStore, tmp_path: Path) -> Callable[[list[Run]], str]:
    """Writes a report of the runs and opens it; gives its address."""

    def write_and_open(runs: list[Run]) -> str:
        path = tmp_path / "report.html"
        composed = page.compose(page.load(str(make_store(runs))))
        html_file.write(html_file.render(composed, datetime.now(UTC)), path)
        for log in ("browser", "performance"):
            browser.get_log(log)  # type: ignore[no-untyped-call]
        browser.get(path.as_uri())
        return path.as_uri()

    return write_and_open


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
    return {url for number, url in asked.items() if number not in blocked | own}


def overflow(browser: Chrome, width: int) -> int:
    """Pixels by which the page is wider than a window of that width."""
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    found = browser.execute_script(
        "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    return int(found)


def sideways(browser: Chrome, width: int) -> tuple[int, list[str]]:
    """The same, and the boxes whose content is wider than they are."""
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    found = browser.execute_script(
        "return [...document.querySelectorAll('*')]"
        ".filter(e => ['auto', 'scroll'].includes(getComputedStyle(e).overflowX))"
        ".filter(e => e.scrollWidth > e.clientWidth)"
        ".map(e => `${e.tagName}.${e.className}: ${e.scrollWidth} in ${e.clientWidth}`)"
    )
    return overflow(browser, width), list(found)


def test_a_figure_can_be_read(
    browser: Chrome, load: Callable[[list[Run]], str], samples: Samples
) -> None:
    address = load(samples["emulator"])
    cell = browser.find_element(
        By.CSS_SELECTOR,
        'td[data-metric="decode_tokens_per_s"][data-target="SM8750:emulator"]',
    )
    assert cell.is_displayed()
    assert cell.text.split() == ["17.22", "±", "0.12"]
    value = cell.get_attribute("data-value")
    assert value is not None
    assert float(value) == pytest.approx((17.21 + 17.35 + 17.11) / 3)
    reference = browser.find_element(
        By.CSS_SELECTOR, 'td[data-metric="perplexity_float"][data-target="SM8750:emulator"]'
    )
    assert reference.text.split() == ["25.480", "device", "+0.33%"]
    notice = browser.find_element(By.ID, "emulator-notice")
    assert notice.is_displayed()
    assert "Emulator speed is not hardware speed." in notice.text
    assert len(browser.find_elements(By.CSS_SELECTOR, "svg circle.point.warmup")) > 0
    assert complaints(browser) == []
    assert requests(browser) <= {address}


@pytest.mark.parametrize("width", [360, 768, 1200, 1920])
def test_it_fits_the_window(
    browser: Chrome, load: Callable[[list[Run]], str], samples: Samples, width: int
) -> None:
    load(samples["mixed"])
    browser.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert overflow(browser, width) <= 0


@pytest.mark.parametrize("width", [360, 1200])
def test_telemetry_and_comparisons_fit_and_stay_silent(
    browser: Chrome, tmp_path: Path, width: int
) -> None:
    database, path = tmp_path / "results.db", tmp_path / "report.html"
    with ResultsStore.open(database) as store:
        lab.add_telemetry(store, lab.sessions())
        for run in lab.comparison():
            store.write_run(run)
    composed = page.compose(page.load(str(database)))
    html_file.write(html_file.render(composed, datetime.now(UTC)), path)
    complaints(browser)
    browser.get(path.as_uri())
    browser.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert overflow(browser, width) <= 0
    lines = browser.find_elements(By.CSS_SELECTOR, "polyline.line")
    assert lines
    assert all(line.size["height"] > 0 or line.size["width"] > 0 for line in lines[:3])
    assert browser.find_element(By.CSS_SELECTOR, "[data-verdict=regressed]").is_displayed()
    assert complaints(browser) == []


@pytest.mark.parametrize("width", [1300, 1100, 1024, 800, 390])
def test_no_part_of_the_page_scrolls_sideways(
    browser: Chrome, tmp_path: Path, samples: Samples, width: int
) -> None:
    """All parts at once: grades, unchecked outputs, comparisons, telemetry, conditions, gaps."""
    database, path = tmp_path / "results.db", tmp_path / "report.html"
    with ResultsStore.open(database) as store:
        lab.add_telemetry(store, lab.sessions())
        for run in (*samples["mixed"], *lab.comparison()):
            store.write_run(run)
    composed = page.compose(page.load(str(database)))
    html_file.write(html_file.render(composed, datetime.now(UTC)), path)
    browser.get(path.as_uri())
    browser.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
    for part in (".grade", "[data-output]", "[data-verdict]", ".timeline", ".conditions", "#gaps"):
        assert browser.find_elements(By.CSS_SELECTOR, part), part
    assert sideways(browser, width) == (0, [])


def test_runs_in_one_line_fit_and_are_found(
    browser: Chrome, load: Callable[[list[Run]], str]
) -> None:
    phone = Sample("SM8750", emulator=True, model="a-model-with-a-rather-long-name")
    values = speeds([999, 1000], [50, 51], [0.04, 0.04], 1310)
    runs = [phone.run(number, "bench", values) for number in range(MOST_IN_FULL + 3)]
    address = load(runs)
    browser.execute_script("document.querySelector('.brief').open = true")
    assert sideways(browser, 390) == (0, [])
    assert overflow(browser, 1200) <= 0
    browser.get(f"{address}#run-{runs[1].id}")
    assert browser.find_element(By.CSS_SELECTOR, "li:target").text.startswith("20 Nov 2026")


def test_hostile_text_is_only_text(
    browser: Chrome, load: Callable[[list[Run]], str], samples: Samples
) -> None:
    run = samples["emulator"][2].model_copy(update={"generated_text": HOSTILE})
    address = load([Run.model_validate(run.model_dump())])
    block = browser.find_element(By.CSS_SELECTOR, "pre.generated")
    shown = block.get_attribute("textContent")
    assert shown == HOSTILE.replace("\0", "\ufffd").replace("\u202e", "[U+202E]")
    assert browser.title == "tiny_llama on SM8750 · qnnfarm"
    assert browser.find_elements(By.CSS_SELECTOR, "script, img, pre b") == []
    assert complaints(browser) == []
    assert requests(browser) <= {address}


def test_the_policy_stops_what_would_slip_through(
    browser: Chrome, load: Callable[[list[Run]], str], samples: Samples
) -> None:
    address = load(samples["emulator"])
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
