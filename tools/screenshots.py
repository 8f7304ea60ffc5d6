"""Screenshots of each page of a report, light and dark, on a desktop and a phone.

    python -m tools.screenshots report.html screenshots/

It needs Chromium and its driver (Debian's `chromium` and `chromium-driver`) and the extra `test`.
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

PAGES = ("overview", "history", "curves", "runs", "compare", "devices", "run")
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
TALLEST = 6000
DRAWN = """
const done = arguments[0], until = performance.now() + 200000;
const shown = () => [...document.querySelectorAll('figure.chart')].filter(f => f.offsetParent);
(function wait() {
  const left = shown().filter(f => 'spec' in f.dataset && !('drawn' in f.dataset));
  if (!left.length || performance.now() > until) { scrollTo(0, 0); done(left.length); }
  else { left[0].scrollIntoView(); setTimeout(wait, 50); }
})();
"""


@contextmanager
def open_browser(*arguments: str, **capabilities: object) -> Iterator[Chrome]:
    """Open a headless Chromium that asks nothing of the network.

    Args:
        arguments: further arguments, without their dashes.
        capabilities: further capabilities of the session.
    """
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        sys.exit("chromium and chromedriver are not installed: Debian's chromium, chromium-driver")
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        options = ChromeOptions()
        options.binary_location = binary
        for argument in (
            "headless",
            "disable-gpu",
            "disable-dev-shm-usage",
            "no-first-run",
            "disable-background-networking",
            "hide-scrollbars",
            f"user-data-dir={profile}",
            *(("no-sandbox",) if os.geteuid() == 0 else ()),
            *arguments,
        ):
            options.add_argument(f"--{argument}")
        for name, value in capabilities.items():
            options.set_capability(name, value)
        browser = Chrome(options=options, service=Service(driver))
        try:
            browser.set_page_load_timeout(250)
            browser.set_script_timeout(250)
            yield browser
        finally:
            browser.quit()


def take_screenshots(
    report: Path,
    folder: Path,
    pages: Sequence[str] = PAGES,
    schemes: Sequence[str] = ("light", "dark"),
) -> list[Path]:
    """Open each page of a report in one file, and keep what it looks like."""
    folder.mkdir(parents=True, exist_ok=True)
    taken = []
    with open_browser() as browser:
        for size, (width, height) in SIZES.items():
            for scheme in schemes:
                media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
                browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
                for page in pages:
                    path = folder / f"{page}-{size}-{scheme}.png"
                    _take(browser, report, page, path, (width, height))
                    taken.append(path)
    return taken


def _take(browser: Chrome, report: Path, page: str, path: Path, size: tuple[int, int]) -> None:
    width, height = size
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get("about:blank")
    browser.get(f"{report.absolute().as_uri()}#{page}")
    if page == "run":
        found = "return document.querySelector('article.run:has(.canvas)')?.id ?? ''"
        browser.get(f"{report.absolute().as_uri()}#{browser.execute_script(found)}")
    browser.execute_async_script(DRAWN)
    tall = int(browser.execute_script("return document.documentElement.scrollHeight"))
    metrics |= {"height": min(tall, TALLEST)}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.save_screenshot(str(path))


def main() -> None:
    """Take the screenshots that the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("report", type=Path, help="a report of one file")
    parser.add_argument("folder", type=Path, help="folder of the pictures")
    parser.add_argument("--pages", nargs="+", default=PAGES, choices=PAGES)
    parser.add_argument("--schemes", nargs="+", default=("light", "dark"))
    chosen = parser.parse_args()
    for path in take_screenshots(chosen.report, chosen.folder, chosen.pages, chosen.schemes):
        print(path)


if __name__ == "__main__":
    main()
