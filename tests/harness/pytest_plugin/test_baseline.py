"""`pytest --baseline` judges what the tests measured as `qnnfarm gate` does."""

from pathlib import Path

import pytest

from harness.results.store import ResultsStore
from tests.harness.results.test_gate import night

CASE = """
import pytest

@pytest.mark.parametrize("run", {runs!r})
def test_measured(record_property, run):
    record_property("qnnfarm.run", run)
"""


@pytest.fixture(scope="module", autouse=True)
def loaded_once() -> None:
    """Or each run of pytest in this process would load it anew."""
    import scipy.stats  # noqa: F401


IMPORTED = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # our packages, in this process


@pytest.mark.parametrize(
    ("level", "sessions", "code", "verdict", "workers"),
    [
        (20.0, 3, 0, "no difference seen", ()),
        (14.0, 3, 1, "regressed", ()),
        pytest.param(
            14.0, 3, 1, "regressed", ("-p", "xdist", "-n", "1"), marks=pytest.mark.variant
        ),
        (14.0, 1, 2, "no verdict", ()),
    ],
)
def test_the_verdict_is_the_exit_code(
    pytester: pytest.Pytester, level: float, sessions: int, code: int, verdict: str,
    workers: tuple[str, ...],
) -> None:  # fmt: skip
    db = Path(pytester.path) / "results.db"
    with ResultsStore.open(db) as store:
        night(store, 0, 20.0)
        night(store, 1, level, sessions=sessions)
        runs = [run.id for run in store.list_runs()][3:]
    pytester.makepyfile(CASE.format(runs=runs))
    options = ("--qnnfarm-db", str(db), "--baseline", "previous", *workers)
    result = pytester.runpytest_inprocess("-p", "harness.pytest_plugin", *IMPORTED, *options)
    result.assert_outcomes(passed=sessions)
    result.stdout.fnmatch_lines(["*baseline previous*", f"*: {verdict} (*"])
    assert result.ret == code


def test_a_baseline_needs_results_to_compare_with(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_one(): pass")
    result = pytester.runpytest_inprocess(
        "-p", "harness.pytest_plugin", *IMPORTED, "--baseline", "main"
    )
    result.stderr.fnmatch_lines(["*--baseline: --qnnfarm-db names the results to compare with*"])
    assert result.ret == pytest.ExitCode.USAGE_ERROR
