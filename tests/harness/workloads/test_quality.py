"""A bound names what it is measured over, and has one answer whatever the database holds."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from harness.errors import WrongUseError
from harness.results.metrics import Measurement
from harness.results.perplexity import PerplexityBound, explain_chance
from harness.results.records import OutputCheck, PerplexityDefinition, Run, WorkloadRecord
from harness.results.store import ResultsStore
from harness.runtimes.base import PerplexityResult, Window
from harness.workloads.bench import Bench
from harness.workloads.quality import QualityCheck, describe, stored_quality
from harness.workloads.session import Session
from tests.harness.results.places import make_run

LIBRARIES = {"Genie from": "wheel", "libGenie.so": "sha256:1"}


def perplexity(*values: float, windows: int = 8, precision: str = "W8A16") -> Run:
    keys = ("perplexity", "perplexity_float", "perplexity_quantized_cpu")
    measured = [
        Measurement(metric=key, value=value) for key, value in zip(keys, values, strict=False)
    ]
    run = make_run(kind="perplexity", status="done", measurements=measured)
    definition = PerplexityDefinition(
        positions="first_cl_minus_ar", windows=windows, tokens=160 * windows
    )
    work = WorkloadRecord(
        runner="genie_perplexity.py", dataset_sha256="7" * 64, perplexity=definition
    )
    container = run.container.model_copy(update={"precision": precision})
    return run.model_copy(update={"workload": work, "container": container})


class FakeRuntime:
    """Scores every text as 33.988."""

    name = "genie"
    scored = 0

    def runner(self, _capability: object) -> str:
        return "genie_perplexity.py"

    def positions(self, _role: str = "target") -> str:
        return "first_cl_minus_ar"

    def windows(self, text: str, most: int | None = None, _role: str = "target") -> list[Window]:
        return [Window(text[:9], (1,) * 160)] * (most or 8)

    def versions(self) -> dict[str, str]:
        return LIBRARIES

    def sha256_of(self, _file: str) -> None:
        return None

    def read_log(self) -> str:
        return ""

    def score(
        self, windows: list[Window], _role: str = "target", _lora: object = None
    ) -> PerplexityResult:
        self.scored += 1
        tokens = 160 * len(windows)
        return PerplexityResult(33.988, (33.988,) * len(windows), tokens, 0, "first_cl_minus_ar")


def session_of(run: Run, runtime: FakeRuntime) -> Session:
    return cast(
        "Session",
        SimpleNamespace(
            container_info=run.container,
            device_info=run.device,
            runtime=runtime,
            require=lambda _: runtime,
            model=SimpleNamespace(runtime=FakeRuntime, windows=runtime.windows),
            settings={},
            container=None,
            device=SimpleNamespace(serial="local"),
            count=SimpleNamespace(highest=1),
            resolve=Path,
            records=lambda: (run.container, run.device, run.provenance),
        ),
    )


@pytest.mark.parametrize("stored", [None, "another text", "more windows", "the same"])
def test_a_bound_has_one_answer_whatever_is_stored(store: ResultsStore, stored: str | None) -> None:
    run, runtime = perplexity(15.7, 15.6), FakeRuntime()
    session = session_of(run, runtime)
    check = QualityCheck(PerplexityBound(20.0))
    if stored == "another text":
        store.write_run(run)
    elif stored == "more windows":
        QualityCheck(PerplexityBound(20.0), windows=2).judge(session, store)
    elif stored == "the same":
        check.judge(session, store)
    before = runtime.scored
    found = check.judge(session, store)
    assert found == OutputCheck(
        outcome="failed",
        reason="perplexity 33.988 over 1 window, 160 tokens (the first CL - AR of each) of the "
        "built-in passage is above the bound of 20 (--max-perplexity)",
    )
    assert runtime.scored - before == (stored != "the same")
    assert QualityCheck(PerplexityBound(34.0)).judge(session, store).outcome == "passed"


def test_other_libraries_measure_again(store: ResultsStore) -> None:
    run, runtime = perplexity(15.7), FakeRuntime()
    check = QualityCheck(PerplexityBound(20.0))
    check.judge(session_of(run, runtime), store)
    runtime.versions = lambda: {**LIBRARIES, "libGenie.so": "sha256:2"}  # type: ignore[method-assign]
    check.judge(session_of(run, runtime), store)
    assert runtime.scored == 2


def test_a_tolerance_is_relative_to_the_float_that_says_most(store: ResultsStore) -> None:
    few, many = perplexity(20.0, 10.0, windows=2), perplexity(18.763, 17.96, windows=8)
    session = session_of(many, FakeRuntime())
    with pytest.raises(WrongUseError, match=r"--max-perplexity 5% is relative .* --reference"):
        QualityCheck(PerplexityBound.parse("5%")).judge(session, store)
    store.write_run(many)
    store.write_run(few)  # newer
    good = QualityCheck(PerplexityBound.parse("5%")).judge(session, store)
    assert good.outcome == "passed"
    assert "8 windows, 1,280 tokens" in good.reason
    assert "+4.5% from the same model in float, within the tolerance of 5%" in good.reason
    bad = QualityCheck(PerplexityBound.parse("4%")).judge(session, store)
    assert (bad.outcome, "outside the tolerance of 4%" in bad.reason) == ("failed", True)


@pytest.mark.parametrize(
    ("values", "precision", "outcome"),
    [
        ((25.5, 25.4), "W8A16", "passed"),
        ((26.6, 25.4), "W8A16", "failed"),
        ((26.6, 25.4), "W4A16", "passed"),
        ((26.6, 25.4), "W4A16KV16", "passed"),
        ((26.6, 25.4), "W8A16KV16", "failed"),
        ((28.5, 25.4), "W4A16", "failed"),
        ((25.5, 25.4, 28.0), "W8A16", "failed"),
        ((25.5,), "W8A16", None),
    ],
)
def test_without_a_bound_the_bits_set_the_tolerance(
    store: ResultsStore, values: tuple[float, ...], precision: str, outcome: str | None
) -> None:
    run = perplexity(*values, precision=precision)
    store.write_run(run)
    found = stored_quality(store, run.container, run.device)
    assert (None if found is None else found.outcome) == outcome
    if found is not None and outcome == "failed" and len(values) == 2:
        assert f"of {precision}: --max-perplexity " in found.reason


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("container", {"sha256": "0" * 64}),
        ("device", {"soc": "SM8650"}),
        ("device", {"emulator": False}),
        ("workload", {"sampler": {"lora": "red=1"}}),
    ],
)
def test_the_perplexity_of_something_else_says_nothing(
    store: ResultsStore, part: str, change: dict[str, object]
) -> None:
    run = perplexity(25.5, 25.4)
    store.write_run(run.model_copy(update={part: getattr(run, part).model_copy(update=change)}))
    assert stored_quality(store, run.container, run.device) is None


def test_the_most_tokens_count_and_of_equals_the_newest(store: ResultsStore) -> None:
    for run in (perplexity(90.0, 25.4), perplexity(25.5, 25.4), perplexity(90.0, 25.4, windows=2)):
        store.write_run(run)
    found = stored_quality(store, run.container, run.device)
    assert found is not None
    assert (found.outcome, describe(run) in found.reason) == ("passed", False)
    # a number that failed its bound is a number
    check = OutputCheck(outcome="failed", reason="above the bound")
    failed = {"status": "failed", "error": "above the bound", "check": check}
    store.write_run(perplexity(30.0, 25.4).model_copy(update=failed))
    found = stored_quality(store, run.container, run.device)
    assert found is not None
    assert found.outcome == "failed"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_perplexity": "much"}, "max_perplexity: 'much' is no bound"),
        ({"max_perplexity": 0.5}, "a number of at least 1"),
        ({"max_perplexity": "0%"}, "or a tolerance relative to the model in float"),
        ({"perplexity_windows": 4}, "belongs to `max_perplexity`"),
    ],
)
def test_bounds_that_are_none(fields: dict[str, object], said: str) -> None:
    with pytest.raises(WrongUseError, match=said):
        Bench.of(**fields)


def test_a_text_that_the_model_predicts_worse_than_by_chance_measures_little() -> None:
    assert explain_chance(64.0, 64) is None
    assert "worse than by chance (a perplexity of 64)" in str(explain_chance(64.1, 64))
