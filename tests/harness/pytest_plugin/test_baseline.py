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


@pytest.mark.parametrize(
    ("level", "sessions", "code", "verdict"),
    [
        (20.0, 3, 0, "no difference seen"),
        (14.0, 3, 1, "regressed"),
        (14.0, 1, 2, "no verdict"),
    ],
)
@pytest.mark.parametrize("workers", [(), ("-p", "xdist", "-n", "1")])
def test_the_verdict_is_the_exit_code(
    pytester: pytest.Pytester, level: float, sessions: int, code: int, verdict: str,
    workers: tuple[str, ...],
) -> None:  # fmt: skip
    if workers and code != 1:
        pytest.skip("workers make no other verdict")
    db = Path(pytester.path) / "results.db"
    with ResultsStore.open(db) as store:
        night(store, 0, 20.0)
        night(store, 1, level, sessions=sessions)
        runs = [run.id for run in store.list_runs()][3:]
    pytester.makepyfile(CASE.format(runs=runs))
    options = ("--qnnfarm-db", str(db), "--baseline", "previous", *workers)
    result = pytester.runpytest_subprocess("-p", "harness.pytest_plugin", *options)
    result.assert_outcomes(passed=sessions)
    result.stdout.fnmatch_lines(["*baseline previous*", f"*: {verdict} (*"])
    assert result.ret == code


def test_a_baseline_needs_results_to_compare_with(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_one(): pass")
    result = pytester.runpytest_subprocess("-p", "harness.pytest_plugin", "--baseline", "main")
    result.stderr.fnmatch_lines(["*--baseline: --qnnfarm-db names the results to compare with*"])
    assert result.ret == pytest.ExitCode.USAGE_ERROR
