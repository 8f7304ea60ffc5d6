"""Sample results in a real store. Every number here is made up: no device gave any of them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness.results.alerts import assess
from harness.results.history import find_series
from harness.results.identity import Subject
from harness.results.metrics import Measurement
from harness.results.records import (
    ContainerInfo,
    DeviceInfo,
    PerplexityDefinition,
    Run,
    RunHead,
    RunMeans,
    WorkloadRecord,
)
from harness.results.store import ResultsStore
from reports import html_file
from reports.content import Results, list_runs
from reports.history import group_series
from reports.page import Page, compose
from tests.harness.results.places import make_run, write_runs
from tests.system import program

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

START = datetime(2026, 11, 20, 9, 30, tzinfo=UTC)
PROMPT = (
    "In the beginning God created the heaven and the earth. "
    "And the earth was without form, and void;"
)
TEXT = (
    " and the LORD said unto Moses, Go, and say unto the children of Israel, <This> & that "
    "is the law of the LORD, that he hath given the people to be."
)
Values = Mapping[str, Sequence[float]]
MakeStore = Callable[[Sequence[Run]], Path]


def changed(run: Run, **changes: object) -> Run:
    """The run with other values in its parts: `provenance__host="x"`."""
    for path, value in changes.items():
        part, _, name = path.partition("__")
        whole = getattr(run, part).model_copy(update={name: value}) if name else value
        run = run.model_copy(update={part: whole})
    return run


def results_of(runs: Iterable[Run]) -> Results:
    """Results of runs that no database has."""
    ordered = sorted(runs, key=lambda run: (run.created_at, run.id))
    measured = tuple(map(RunMeans.of, ordered))
    series = find_series(measured, [RunHead.of(run, Subject.of(run).id) for run in ordered])
    groups, listing = group_series(series, measured), list_runs(ordered)
    return Results(
        "results.db", measured, groups, series, listing, tuple(ordered), assess(series, ())
    )


def composed(runs: Iterable[Run]) -> Page:
    """The page of runs that no database has."""
    return compose(results_of(runs))


def html_of(runs: Iterable[Run]) -> str:
    """The report of runs that no database has."""
    return html_file.render(composed(runs), START + timedelta(days=1))


class Sample:
    """Makes runs of one container on one device, each an hour after the one before."""

    def __init__(self, soc: str, *, emulator: bool, model: str = "tiny_llama") -> None:
        self.container = ContainerInfo(
            model=model,
            sha256=("e" if emulator else "f") + f"{abs(int(soc[2:])):063x}",
            target=f"{soc}:emulator" if emulator else soc,
            ars=(1, 32) if emulator else (1, 128),
            cl=192 if emulator else 4096,
            n_splits=2,
            precision="W8A16",
        )
        self.device = DeviceInfo(
            serial=f"127.0.0.1:{soc[2:]}" if emulator else f"R3CX{soc[2:]}A",
            soc=soc,
            emulator=emulator,
            model="virtual" if emulator else "Galaxy S25",
            manufacturer="qnnfarm" if emulator else "Samsung",
            dsp_arch="v79" if soc == "SM8750" else "v75",
            abi="x86_64" if emulator else "arm64-v8a",
            android_version="15",
        )

    def run(self, number: int, kind: str, values: Values, **changes: object) -> Run:
        """Run `number` of the sample; a benchmark's first values are its warm-up."""
        warmup = 1 if kind == "bench" else 0
        measured = [
            Measurement(
                metric=key, value=value, repetition=max(index - warmup, 0), is_warmup=index < warmup
            )
            for key, series in values.items()
            for index, value in enumerate(series)
        ]
        fields: dict[str, object] = {
            "id": f"{number:032x}",
            "kind": kind,
            "status": "done",
            "created_at": START + timedelta(hours=number),
            "container": self.container,
            "device": self.device,
            "workload": self.workload(kind, repetitions=3 if warmup else 1, warmup=warmup),
            "measurements": tuple(measured),
        }
        return make_run(**{**fields, **changes})

    def workload(self, kind: str, *, repetitions: int, warmup: int) -> WorkloadRecord:
        """The workload of each kind of run."""
        if kind == "perplexity":
            return WorkloadRecord(
                runner="genie_t2t_run.py",
                dataset_sha256="d" * 64,
                perplexity=PerplexityDefinition(
                    positions="first_cl_minus_ar", windows=8, tokens=1280
                ),
            )
        return WorkloadRecord(
            runner="genie_t2t_run.py" if self.device.emulator else "genie-t2t-run",
            prompt_tokens=64 if kind == "bench" else None,
            max_new_tokens=16 if kind == "bench" else 40,
            repetitions=repetitions,
            warmup=warmup,
            sampler={"greedy": True, "seed": 42},
            prompt=PROMPT if kind == "generate" else None,
        )


def speeds(
    prefill: Sequence[float], decode: Sequence[float], ttft: Sequence[float], rss_mib: float
) -> Values:
    """What a benchmark measures."""
    return {
        "prefill_tokens_per_s": prefill,
        "decode_tokens_per_s": decode,
        "ttft_s": ttft,
        "init_s": [0.412 + 0.004 * index for index in range(len(decode))],
        "peak_rss_bytes": [(rss_mib + index) * 2**20 // 1 for index in range(len(decode))],
        "prompt_tokens": [64.0] * len(decode),
        "generated_tokens": [16.0] * len(decode),
    }


def perplexity(device: float, in_float: float, quantized: float) -> Values:
    """What a perplexity run measures."""
    return {
        "perplexity": [device],
        "perplexity_float": [in_float],
        "perplexity_quantized_cpu": [quantized],
    }


def emulator_runs() -> list[Run]:
    """Two SoCs on the emulator, as a first trial gives them."""
    runs: list[Run] = []
    for soc, shift in (("SM8750", 0.0), ("SM8650", -1.3)):
        sample = Sample(soc, emulator=True)
        number = len(runs)
        decode = [14.9 + shift, 17.21 + shift, 17.35 + shift, 17.11 + shift]
        prefill = [118.2 + shift, 121.4 + shift, 122.0 + shift, 120.7 + shift]
        ttft = [0.61, 0.534, 0.529, 0.541]
        runs += [
            sample.run(number, "bench", speeds(prefill, decode, ttft, 412)),
            sample.run(number + 1, "perplexity", perplexity(25.565, 25.48, 25.606)),
            sample.run(
                number + 2, "generate", speeds([120.0], [17.0], [0.53], 415), generated_text=TEXT
            ),
        ]
    return runs


def mixed_runs() -> list[Run]:
    """The emulator beside phones, with what goes wrong in a lab."""
    runs = emulator_runs()
    number = len(runs)
    phone = Sample("SM8750", emulator=False, model="Llama-3.2-1B")
    older = Sample("SM8650", emulator=False, model="Llama-3.2-1B")
    steady = speeds(
        [1290.0, 1512.3, 1508.8, 1515.0],
        [41.0, 53.6, 53.7, 53.5],
        [0.05, 0.0371, 0.0372, 0.0370],
        1310,
    )
    warmer = speeds(
        [1280.0, 1490.1, 1471.5, 1466.2],
        [40.2, 51.9, 51.0, 50.1],
        [0.05, 0.038, 0.0384, 0.0388],
        1312,
    )
    shaky = speeds(
        [700.0, 1010.0, 1391.0, 998.0], [22.0, 20.4, 44.1, 31.9], [0.09, 0.081, 0.052, 0.066], 1280
    )
    runs += [
        phone.run(number, "bench", steady),
        phone.run(number + 1, "bench", warmer),
        phone.run(number + 2, "perplexity", perplexity(13.412, 12.91, 13.375)),
        older.run(number + 3, "bench", shaky),
        older.run(
            number + 4,
            "bench",
            {},
            status="failed",
            error="device R3CX8650A: `sh run.sh` exited with 134: "
            "Could not create context from binary: error 1002",
        ),
        older.run(number + 5, "perplexity", {}, status="interrupted"),
    ]
    return runs


@pytest.fixture(scope="session")
def browser() -> "Iterator[Chrome]":
    """One Chromium for all tests of pages; its logs are read before a page is opened."""
    from tools import screenshots  # with Selenium, which most tests do not need

    program("chromium"), program("chromedriver")
    logs = {"goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
    with screenshots.open_browser("disable-component-update", "disable-sync", **logs) as opened:
        yield opened


@pytest.fixture
def make_store(tmp_path: Path) -> Callable[[Sequence[Run]], Path]:
    """Writes runs into a new results database."""

    def make(runs: Sequence[Run]) -> Path:
        path = tmp_path / "results.db"
        with ResultsStore.open(path) as store:
            write_runs(store, runs)
        return path

    return make
