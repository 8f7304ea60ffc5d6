"""The HTML: complete, self-contained, and deaf to what the data would like it to do."""

import os
import re
import resource
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import get_args

import pytest

from harness.console import visible
from harness.results.records import Positions, Run
from harness.words import percent
from reports import html_file
from reports.errors import ReportError
from reports.text import LONGEST_TEXT, POSITIONS, listing, shorten
from tests.reports import lab
from tests.reports.conftest import (
    Sample,
    changed,
    composed,
    emulator_runs,
    html_of,
    mixed_runs,
    perplexity,
    speeds,
)

pytestmark = pytest.mark.first
GROUP = "d" * 32
CSP = html_file.load_assets().policy()
VEGA = html_file.load_assets().vega
FRAGMENTS = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '" onmouseover="alert(1)',
    "' style='x",
    "</pre></style></title><!--",
    "]]><![CDATA[",
    "{{ 7 * 7 }}{% raw %}",
    "&lt;b&gt; &amp;amp;",
    "javascript:alert(1)",
    "\u202egnp.exe\u2066",
    "\x00\x1b[31m\x07\r\x7f\x85",
    "\ufffe\U0001f600\u0301",
    "http://example.org/x.png",
)


class Structure(HTMLParser):
    """Tags with the names of their attributes, attribute values, and text."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, tuple[str, ...]]] = []
        self.values: list[tuple[str, str, str]] = []
        self.text: list[str] = []
        self.comments: list[str] = []
        self.feed(html.replace(VEGA, ""))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, tuple(name for name, _ in attrs)))
        self.values += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)


def infected(run: Run, text: str, **changes: object) -> Run:
    """The run with the text wherever text from outside can be."""
    data = run.model_dump()
    data["container"] |= {"model": text, "target": text}
    data["device"] |= dict.fromkeys(
        ("serial", "soc", "model", "manufacturer", "dsp_arch", "abi", "android_version"), text
    )
    data["workload"] |= {"prompt": text, "sampler": {text: text}}
    data["provenance"] |= {
        "toolchain": text,
        "toolchain_versions": {text: text},
        "library_versions": {text: text},
        "host": text,
        "git_commit": text,
    }
    data |= {
        "generated_text": text,
        "label": text,
        "check": {"outcome": "passed", "reason": text},
        "conditions": [{"name": text, "outcome": text, "reason": text, "before": text, text: text}],
    }
    return Run.model_validate({**data, **changes})


def infected_runs(text: str) -> list[Run]:
    bench, perplexity, *_ = emulator_runs()
    compared = [
        infected(run, text, label=run.label, group_id=run.group_id, session=run.session)
        for run in lab.comparison()
    ]
    return [
        infected(bench, text),
        infected(perplexity, text),
        infected(bench, text, id="f" * 32, status="failed", error=text),
        *compared,
    ]


def test_text_from_outside_changes_no_structure() -> None:
    harmless = Structure(html_of(infected_runs("harmless")))
    text = "".join(FRAGMENTS)
    found = Structure(html_of(infected_runs(text)))
    assert found.tags == harmless.tags
    assert found.comments == []
    assert ("meta", "content", CSP) in found.values
    addresses = {name: [v for _, key, v in found.values if key == name] for name in ("href", "src")}
    assert all(value.startswith(("#", "data:")) for value in addresses["href"])
    assert all(value.startswith("data:") for value in addresses["src"])
    shown = "".join(found.text)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", shown)
    stored = infected(emulator_runs()[0], text).generated_text
    assert stored is not None
    assert visible(stored) in shown


@pytest.mark.parametrize("runs", [mixed_runs, list])
def test_nothing_comes_from_elsewhere(runs: Callable[[], list[Run]]) -> None:
    found = Structure(html_of(runs()))
    tags = {tag for tag, _ in found.tags}
    assert tags.isdisjoint({"iframe", "img", "object", "embed", "base", "video"})
    assert {value for tag, name, value in found.values if (tag, name) == ("form", "class")} <= {
        "pick"
    }
    assert not any("src" in names for tag, names in found.tags if tag == "script")
    assert [value for tag, _, value in found.values if tag == "link"] == ["icon", "data:,"]
    assert not any(name.startswith("on") for _, names in found.tags for name in names)
    css = "".join(found.text[: found.text.index("qnnfarm report")])
    assert "url(" not in css
    assert "@import" not in css


def test_anchors_lead_somewhere_and_names_are_unique() -> None:
    found = Structure(html_of(mixed_runs()))
    names = [value for _, name, value in found.values if name == "id"]
    assert len(names) == len(set(names))
    targets = {value[1:] for tag, name, value in found.values if (tag, name) == ("a", "href")}
    assert targets <= set(names)


def test_the_notice_is_there_whenever_a_run_was_emulated() -> None:
    hardware = [run for run in mixed_runs() if not run.device.emulator]
    failed = emulator_runs()[0].model_copy(update={"status": "failed", "error": "no"})
    notice = "Emulator speed is not hardware speed."
    assert notice in html_of([*hardware, failed])
    assert notice not in html_of(hardware)


def test_failures_are_listed_with_their_error() -> None:
    text = "".join(Structure(html_of(mixed_runs())).text)
    assert "Could not create context from binary: error 1002" in text
    assert "its process ended before the run finished" in text


def test_provenance_is_complete() -> None:
    run = emulator_runs()[0]
    text = "".join(Structure(html_of([run])).text)
    for value in (
        run.container.sha256,
        run.device.serial,
        run.provenance.host,
        str(run.provenance.git_commit),
        *run.provenance.toolchain_versions,
        *run.provenance.library_versions.values(),
        "3 repetitions after 1 warm-up",
        "AR 1, 32, context 192",
    ):
        assert value in text


def test_numbers_stand_beside_what_ran() -> None:
    """Rows, lanes, comparisons and perplexities of two context lengths can be told apart."""
    phone = Sample("SM8750", emulator=False)
    longer = phone.container.model_copy(
        update={"sha256": "b" * 64, "cl": 512, "precision": "W4A16"}
    )
    values = speeds([900.0] * 4, [50.0] * 4, [0.05] * 4, 300)
    runs = [
        phone.run(2 * number + (side == "B"), "bench", values, group_id=GROUP, session=number,
                  label=side, container=container)
        for number in range(6)
        for side, container in (("A", phone.container), ("B", longer))
    ]  # fmt: skip
    runs.append(phone.run(20, "perplexity", perplexity(13.4, 12.9, 13.3), container=longer))
    html = html_of(runs)
    text = " ".join("".join(Structure(html).text).split())
    a, b = phone.container.sha256[:12], "b" * 12
    for side, bits, cl, sha in (("A", "W8A16", 4096, a), ("B", "W4A16", 512, b)):
        assert f"pp64+tg16 · {side} · {bits}, AR 1, 128, CL {cl} · container {sha}" in text
    assert f"A {a} W8A16, AR 1, 128, CL 4096B {b} W4A16, AR 1, 128, CL 512pp64+tg16 on" in text
    perplexities = html.split('id="hardware-perplexity"')[1].split("</table>")[0]
    assert f"W4A16, AR 1, 128, CL 512 · container&nbsp;<code>{b}" in perplexities


def test_a_machine_without_a_soc_has_a_name_and_links() -> None:
    runs = [run for run in lab.comparison() if run.session == 0]
    for model, name in (("vm", "vm"), (None, "an unknown device")):
        none: dict[str, object] = {"device__manufacturer": None, "device__android_version": None}
        nameless = [changed(run, device__soc="", device__model=model, **none) for run in runs]
        assert composed(nameless).title == f"Llama-3.2-1B on {name}"
        html = html_of(nameless)
        assert f"<h1>Bench of Llama-3.2-1B on {name}</h1>" in html
        assert f"<b>Llama-3.2-1B on {name}</b>" in html
        assert not re.search(r"<a [^>]*></a>| on <| on ,", html)


@pytest.mark.parametrize("emulator", [True, False])
def test_emulator_speeds_are_neither_graded_nor_called_unsteady(emulator: bool) -> None:
    shaky = Sample("SM8750", emulator=emulator)
    values = speeds([1, 100, 200, 400], [1, 10, 20, 40], [1, 0.1, 0.2, 0.4], 300)
    html = html_of([shaky.run(1, "bench", values)])
    assert ("of the mean" in html) is not emulator
    assert ('class="grade"' in html) is not emulator
    assert "Unchecked" in html


def test_long_texts_are_cut_and_say_so() -> None:
    assert shorten("a" * LONGEST_TEXT) == "a" * LONGEST_TEXT
    cut = shorten("a" * (LONGEST_TEXT + 1234))
    assert cut.endswith("[… 1,234 more characters are in the database]")


def test_words() -> None:
    assert percent(0.0025) == "+0.25%"
    assert percent(-0.1234) == "-12.3%"
    assert [listing(()), listing(("a",)), listing(("a", "b", "c"))] == ["", "a", "a, b and c"]
    assert visible("a\tb\nc\x1b\u202e") == "a\tb\nc\u241b[U+202E]"


def test_a_report_appears_whole(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    html_file.write("one", path)
    html_file.write("two", path)
    assert path.read_text() == "two"
    assert [entry.name for entry in path.parent.iterdir()] == ["report.html"]
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.parametrize("place", [".", "nope/report.html", "file/report.html", "x" * 300])
def test_a_report_that_cannot_be_written_is_one_line(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ReportError) as caught:
        html_file.write("html", tmp_path / place)
    assert caught.value.exit_code == 2
    assert str(caught.value).startswith(f"cannot write {tmp_path / place}: ")
    assert "\n" not in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, limits[1]))
    try:
        with pytest.raises(ReportError) as caught:
            html_file.write("x" * 100_000, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(caught.value) == f"cannot write {path}: File too large"
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def contrast(first: str, second: str) -> float:
    """WCAG 2 contrast ratio of two #rrggbb colours."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_can_be_read_in_both_schemes(scheme: int) -> None:
    css = (Path(html_file.__file__).parent / "templates" / "style.css").read_text()
    blocks = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    colours = dict(re.findall(r"--(\w[\w-]*): (#[0-9a-f]{6})", blocks[scheme]))
    for ink in ("ink", "soft", "hardware", "emulator", "bad"):
        for ground in ("paper", "card", "faint"):
            assert contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground)
    assert contrast(colours["ink"], colours["notice"]) >= 7


def test_every_kind_of_positions_has_words() -> None:
    assert set(POSITIONS) == set(get_args(Positions))
