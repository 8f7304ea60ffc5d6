"""The summary on terminals of all widths, and elsewhere."""

import io
import json
import re
from datetime import timedelta
from pathlib import Path

import pytest
from rich.console import Console

from harness.importing.importer import read_runs, store_runs
from harness.results.metrics import find_metric
from harness.results.records import Origin, OutputCheck, Run
from harness.results.store import ResultsStore
from reports import html_file, page, terminal
from reports.document import to_document
from tests.reports import lab
from tests.reports.conftest import START, Sample, changed, composed, speeds

_PHONES = [*lab.sessions(), *lab.comparison()]
_ALL = ("Prefill", "Decode", "TTFT", "Init", "Memory", "Perplexity", "in float", "grade")


def _emulated(model: str = "tiny_llama") -> list[Run]:
    emulator = Sample("SM8750", emulator=True, model=model)
    values = speeds([4001, 4002, 4123], [16.2, 16.3, 17.1], [0.5, 0.51, 0.52], 310)
    scores = {"perplexity": [25.565], "perplexity_error": [0.719], "perplexity_float": [25.48]}
    return [emulator.run(1, "bench", values), emulator.run(2, "perplexity", scores)]


def _shown(runs: list[Run], width: int | None) -> str:
    """What is printed on a terminal that is so wide, or into a pipe; one without colours."""
    return _printed(composed(runs), width)


def _printed(whole: page.Page, width: int | None) -> str:
    file = io.StringIO()
    console = Console(
        file=file, width=width or 60, force_terminal=width is not None, color_system=None,
        highlight=False,
    )  # fmt: skip
    terminal.print_page(whole, console)
    return file.getvalue()


def _table(text: str) -> list[str]:
    lines = text.splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("Model"))
    return lines[first : lines.index("", first)]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140])
@pytest.mark.parametrize("runs", [_PHONES, _emulated()], ids=["phones", "emulator"])
def test_a_terminal_gets_whole_words_and_numbers(runs: list[Run], width: int) -> None:
    text = _shown(runs, width)
    assert max(map(len, text.splitlines())) <= width
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    table = "\n".join(_table(text))
    (row, *_) = composed(runs).sections[0].rows
    names = (row.subject.model, row.subject.target, row.label)
    for word in (*names, "Prefill", "tokens/s", "Decode"):
        assert re.search(rf"(?<!\S){re.escape(word)}(?!\S)", table), (word, table)
    for key in ("prefill_tokens_per_s", "decode_tokens_per_s"):
        for part in row.cells[key].show(find_metric(key)).split(" ± "):
            assert re.search(rf"(?<!\S){re.escape(part)}(?!\S)", table), (part, table)


@pytest.mark.parametrize(
    ("width", "left_out"),
    [
        (140, ()),
        (85, ("Memory",)),
        (75, ("Memory", "Init")),
        (65, ("Memory", "Init", "in float")),
        (56, ("Memory", "Init", "in float", "grade")),
        (50, ("Memory", "Init", "in float", "grade", "TTFT")),
        (42, ("Memory", "Init", "in float", "grade", "TTFT", "Perplexity")),
        (20, ("Memory", "Init", "in float", "grade", "TTFT", "Perplexity")),
    ],
)
def test_columns_go_by_their_rank(width: int, left_out: tuple[str, ...]) -> None:
    heading = "".join(_table(_shown(_emulated(), width))[:2])
    assert [name for name in _ALL if name not in heading] == [n for n in _ALL if n in left_out]


def test_columns_without_a_value_go_first() -> None:
    heading = "".join(_table(_shown(_PHONES, 75))[:2])
    assert "Init" in heading
    assert "Perplexity" not in heading
    assert "Perplexity" in "".join(_table(_shown(_PHONES, 100))[:2])


@pytest.mark.parametrize("width", [60, 80, 140])
def test_a_name_without_end_is_broken_and_cuts_no_number(width: int) -> None:
    text = _shown(_emulated("x" * 300), width)
    assert max(map(len, text.splitlines())) <= width
    assert "4,062" in text
    assert "17.20" not in text  # the mean of the values is another
    assert "16.70" in text


def test_a_pipe_gets_everything_and_no_spaces_at_the_end() -> None:
    text = _shown([*_PHONES, *_emulated()], None)
    heading = "".join(_table(text)[:2])
    assert all(name in heading for name in _ALL)
    assert "SM8750:emulator pp64+tg16" in text
    assert [line for line in text.splitlines() if line != line.rstrip()] == []


def test_rows_that_look_alike_name_their_containers() -> None:
    runs = [run for run in lab.comparison(0.2) if run.label]
    longer: dict[str, object] = {
        "container__sha256": "b" * 64, "container__cl": 512, "container__precision": "W4A16"
    }  # fmt: skip
    runs = [changed(run, **longer) if run.label == "B" else run for run in runs]
    text = _shown(runs, None)
    table = "\n".join(_table(text))
    a = runs[0].container.sha256[:12]
    for words in ("1B W8A16", "AR 1, 128, CL 4096", "1B W4A16", "AR 1, 128, CL 512"):
        assert words in table
    told = (
        f"A is Llama-3.2-1B W8A16, AR 1, 128, CL 4096 ({a}), "
        f"B is Llama-3.2-1B W4A16, AR 1, 128, CL 512 ({'b' * 12}), pp64+tg16"
    )
    assert told in text
    assert re.search(
        r"^  Decode -20\.0% \(-\d+\.\d% to -\d+\.\d% at 97%\): regressed", text, re.MULTILINE
    )
    assert re.search(
        r"^! Llama-3\.2-1B W8A16, SM8750, pp64\+tg16, A: Unchecked", text, re.MULTILINE
    )
    assert a not in table


def test_rows_that_look_alike_name_the_hashes_of_their_containers() -> None:
    runs = lab.comparison(0.2)
    shown = _shown(runs, None)
    for sha256 in {run.container.sha256[:12] for run in runs}:
        assert f"AR 1, 128, CL 4096, {sha256}" in "\n".join(_table(shown))
        assert re.search(rf"! Llama-3.2-1B W8A16, SM8750, pp64.tg16, [AB], {sha256}: ", shown)


def test_windows_and_tokens_stand_with_a_perplexity() -> None:
    table = "\n".join(_table(_shown(_emulated(), None)))
    assert "± 0.719" in table
    assert "8 windows" in table
    assert "1,280 tokens" in table


def test_identical_failures_are_one_line() -> None:
    phones = [Sample("SM8650", emulator=False) for _ in range(3)]
    serials = ["R1", "R2", "R2"]
    runs = []
    for number, (phone, serial) in enumerate(zip(phones, serials, strict=True)):
        error = f"device {serial}: `sh run.sh` in run {number:032x} exited with 134"
        failed = phone.run(number, "bench", {}, status="failed", error=error)
        runs.append(changed(failed, device__serial=serial))
    runs.append(phones[0].run(4, "bench", {}, status="failed", error="the runner hung"))
    verdict, first, second = _shown(runs, None).splitlines()
    assert verdict == "4 recent runs without a result"
    assert first.startswith(
        "x bench of tiny_llama W8A16 on 2 devices, 3 times from 2026-11-20 09:30 "
        "to 2026-11-20 11:30: failed: device R2: `sh run.sh`"
    )
    assert second == "x bench of tiny_llama W8A16 on R3CX8650A: failed: the runner hung"


def test_what_many_rows_share_is_said_once() -> None:
    phone = Sample("SM8750", emulator=False)
    values = speeds([1500] * 4, [50] * 4, [0.04] * 4, 1310)
    runs = []
    for number in range(4):
        run = phone.run(number, "bench", values)
        runs.append(changed(run, workload__prompt_tokens=64 + number))
    text = _shown(runs, None)
    assert text.count("the output was compared neither") == 1
    assert "! 4 of 4 rows: Unchecked" in text
    assert "pp67+tg16: The prompt had 64 tokens, but 67 were requested" in text


@pytest.mark.needs("plugins.other_runtimes")
def test_thirty_nights_of_another_tool_are_a_row_for_each_test(tmp_path: Path) -> None:
    """llama.cpp differs every other night; the newest nights are one row, in a section apart."""
    tests = ((512, 0, 8200.0), (0, 128, 141.0))
    written, database = tmp_path / "llama-bench.jsonl", tmp_path / "results.db"
    for number in range(30):
        for prompt, new, speed in tests:
            entry = {
                "build_commit": f"{number // 2:07x}", "build_number": 5000 + number // 2,
                "cpu_info": "AMD Ryzen 9 7950X", "gpu_info": "NVIDIA GeForce RTX 4090",
                "backends": "CUDA", "model_filename": "llama-3.2-1b-q4_k_m.gguf",
                "model_type": "llama 1B Q4_K - Medium",
                "model_size": 799862912, "model_n_params": 1235814432, "n_batch": 2048,
                "n_prompt": prompt, "n_gen": new, "n_depth": 0,
                "test_time": f"{START + timedelta(days=number):%Y-%m-%dT%H:%M:%SZ}",
                "samples_ts": [speed + number % 7, speed, speed + 1],
            }  # fmt: skip
            with written.open("a") as file:
                file.write(json.dumps(entry) + "\n")
    with ResultsStore.open(database) as store:
        store_runs(store, read_runs(written))
    whole = page.compose(page.load(str(database)))
    (section,) = whole.sections
    assert (section.key, section.title) == ("imported", "from llama-bench")
    assert sorted(row.label for row in section.rows) == ["pp512", "tg128"]
    changed = "llama.cpp 000000d (5013) → 000000e (5014)"
    expected = (f"The row leaves out 28 runs before: {changed}",)
    assert [row.remarks for row in section.rows] == [expected] * 2
    printed = _printed(whole, 120)
    assert len(printed.splitlines()) < 24
    assert "nchecked" not in printed
    assert "Hexagon" not in html_file.render(whole, START)


def test_imported_rows_name_their_phones() -> None:
    """Other tools' containers have no target."""
    runs = [
        changed(
            run,
            container__target="",
            workload__sampler={},
            origin=Origin(tool="llama-bench", file="a.json", sha256=f"{number:064x}"),
        )
        for number, soc in enumerate(("SM8650", "SM8750"))
        for phone in [Sample(soc, emulator=False)]
        for run in [phone.run(number, "bench", speeds([600.0] * 4, [20.0] * 4, [0.1] * 4, 900))]
    ]
    text = _shown(runs, None)
    assert "SM8650 pp64+tg16" in text
    assert "SM8750 pp64+tg16" in text
    rows = to_document(composed(runs), "report.html")["rows"]
    assert isinstance(rows, list)
    facts = [(row["soc"], row["device"]) for row in rows]
    assert facts == [("SM8650", "Samsung Galaxy S25"), ("SM8750", "Samsung Galaxy S25")]


def test_llama_cpp_beside_genie_on_a_virtual_device_is_not_the_emulator() -> None:
    genie, _ = _emulated()
    ours = changed(
        genie,
        container__target="",
        workload__runner="llama-bench",
        workload__sampler={"runtime": "llama.cpp"},
    )
    both, alone = composed([genie, ours]), composed([ours])
    assert [section.title for section in both.sections] == ["on the emulator and the host CPU"]
    assert [section.title for section in alone.sections] == ["on the host CPU"]
    assert "emulator" not in _printed(alone, 100).lower()
    # The device itself is virtual still.
    assert '<span>tiny_llama <i class="chip">host CPU</i>' in html_file.render(alone, START)
    emulated = html_file.render(composed([genie]), START)
    assert '<span>tiny_llama <i class="chip">emulator</i>' in emulated


@pytest.mark.parametrize("width", [60, 100, None])
def test_many_rows_are_printed_as_matrices(width: int | None) -> None:
    """Three models on five phones: the speeds of all, by which one unchecked output stands out."""
    passed = OutputCheck(outcome="passed", reason="the tokens of reference.txt")
    made = [
        changed(
            Sample(f"SM865{soc}", emulator=False, model=model).run(
                10 * soc + n, "bench", speeds([9.0 + soc] * 4, [50.0 + soc] * 4, [1.0] * 4, 900)
            ),
            check=OutputCheck() if soc == n == 0 else passed,
        )
        for n, model in enumerate(("Llama", "Qwen", "Phi"))
        for soc in range(5)
    ]
    text = _shown(made, width)
    lines = text.splitlines()
    assert width is None or max(map(len, lines)) <= width
    assert {"Decode,", "Prefill,", "pp64+tg16"} <= {*text.split()}
    for soc in range(5):
        assert text.count(f"5{soc}.00") == text.count(f"{9 + soc}.00") == 3, text
    assert "15 rows with all metrics" in text
    assert sum("unchecked" in line for line in lines) == 2, "in both matrices"
    assert len(lines) < (50 if width == 60 else 35)
