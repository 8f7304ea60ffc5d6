"""`record_measurement`: what becomes of a test's numbers, however it ends."""

from pathlib import Path

import pytest

from harness.pytest_plugin.measurements import format_table
from harness.results.identity import Subject
from harness.results.records import Run
from harness.results.store import ResultsStore
from tests.harness.pytest_plugin.conftest import Farm

_ENDS = """
import pytest

@pytest.fixture
def breaks(record_measurement):
    record_measurement("ttft_s", 0.1)
    raise ValueError("no such file")

def test_passes(session, record_measurement):
    record_measurement("ttft_s", 0.1)

@pytest.mark.xfail(reason="slow")
def test_is_expected_to_fail(session, record_measurement):
    record_measurement("ttft_s", 0.1)
    assert False, "as ever"

def test_breaks_in_a_fixture(session, breaks): pass

def test_is_interrupted(session, record_measurement):
    record_measurement("ttft_s", 0.1)
    pytest.exit("Ctrl-C")
"""


def _runs(db: Path) -> tuple[Run, ...]:
    with ResultsStore.open(db, create=False) as store:
        return store.list_runs()


def test_only_what_passed_is_a_result(
    farm: Farm, two_devices: tuple[str, str], small_bundle: Path, tmp_path: Path
) -> None:
    db = tmp_path / "results.db"
    outcome = farm(
        _ENDS, f"--device=virtual:{two_devices[0]}", "--container", small_bundle,
        "--qnnfarm-db", db,
    )  # fmt: skip
    found = {run.label.partition("::")[2]: (run.status, run.error) for run in _runs(db)}
    assert found == {
        "test_passes": ("done", None),
        "test_is_expected_to_fail": ("failed", "AssertionError: as ever\nassert False"),
        "test_breaks_in_a_fixture": ("failed", "ValueError: no such file"),
        "test_is_interrupted": ("interrupted", None),
    }, outcome.output


_RERUNS = """
from _pytest.runner import runtestprotocol

def pytest_runtest_protocol(item, nextitem):  # as pytest-rerunfailures does
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    runtestprotocol(item, nextitem=nextitem, log=False)
    item._initrequest()
    for report in runtestprotocol(item, nextitem=nextitem, log=False):
        item.ihook.pytest_runtest_logreport(report=report)
    return True
"""
_TRIES = """
import pytest
tries = []

@pytest.fixture
def first(request):
    request.node.user_properties.append(("try", len(tries)))

def test_again(first, record_measurement):
    tries.append(1)
    record_measurement("ttft_s", len(tries) / 10)
    assert len(tries) == 2
"""


def test_a_rerun_has_the_properties_of_its_last_try(farm: Farm, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(_RERUNS)
    outcome = farm(_TRIES)
    assert outcome.counts() == {"tests": 1}, outcome.output
    found = outcome.cases()["test_again"].iter("property")
    values = [(one.attrib["name"], one.attrib["value"]) for one in found]
    assert values == [("try", "1"), ("ttft_s", "0.2")]


_WORKLOADS = """
import pytest

@pytest.mark.parametrize("n", [1, 2])
def test_two_lengths(session, record_measurement, n):
    for rate in (100.0, 102.0):
        record_measurement("prefill_tokens_per_s", n * rate, test="pp512")
        record_measurement("prefill_tokens_per_s", n * rate / 2, test="pp1024")
"""


def test_workloads_are_kept_apart_and_sessions_together(
    farm: Farm, two_devices: tuple[str, str], small_bundle: Path, tmp_path: Path
) -> None:
    db = tmp_path / "results.db"
    outcome = farm(
        _WORKLOADS, f"--device=virtual:{two_devices[0]}", "--container", small_bundle,
        "--qnnfarm-db", db, "--repeat=2",
    )  # fmt: skip
    assert outcome.returncode == 0, outcome.output
    groups: dict[str, list[Run]] = {}
    for run in _runs(db):
        groups.setdefault(run.group_id, []).append(run)
    assert len(groups) == 4
    rates = []
    for runs in groups.values():
        assert sorted(run.session for run in runs) == [0, 1]
        assert len({Subject.of(run) for run in runs}) == 1
        (values,) = {run.values("prefill_tokens_per_s") for run in runs}
        rates.append(values)
    assert sorted(rates) == [(50.0, 51.0), (100.0, 102.0), (100.0, 102.0), (200.0, 204.0)]


_LOSES_ITS_FOLDER = """
import shutil

def test_fails_without_a_place_for_logs(device, tmp_path_factory):
    shutil.rmtree(tmp_path_factory.getbasetemp())
    assert device.serial == "x", "the real reason"

def test_goes_on(device): pass
"""


def test_a_failure_whose_logs_cannot_be_kept_is_still_that_failure(
    farm: Farm, two_devices: tuple[str, str]
) -> None:
    outcome = farm(_LOSES_ITS_FOLDER, f"--device=virtual:{two_devices[0]}")
    assert "INTERNALERROR" not in outcome.output
    assert outcome.counts() == {"tests": 2, "failures": 1}, outcome.output
    assert "the real reason" in outcome.output
    assert "cannot be kept: " in outcome.output


def _row(values: list[float], **changes: object) -> dict[str, object]:
    row: dict[str, object] = {
        "model": "llama", "container": "a" * 64, "size": 2**20, "params": None,
        "backend": "HTP v79", "device": "R3", "soc": "SM8750", "emulator": False, "test": "pp512",
        "metric": "prefill_tokens_per_s", "values": values,
    }  # fmt: skip
    return row | changes


def test_two_containers_of_one_model_have_a_line_each() -> None:
    lines = format_table(
        [
            _row([99.0, 101.0], session="one"),
            _row([200.0], container="b" * 64),
            _row([102.0], session="two"),
        ]
    )
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["llama " + 12 * c for c in "ab"]
    assert [line.split("|")[-2].strip() for line in lines[2:]] == ["101.00 ± 1.41", "200.00"]
    (line,) = format_table([_row([100.0, 102.0])])[2:]
    assert line.split("|")[1].strip() == "llama"


@pytest.mark.parametrize(
    ("metric", "values", "words"),
    [
        ("ttft_s", [0.0371, 0.0373], "pp512 of llama on R3: Time to first token 37.2 ± 0.1 ms"),
        ("peak_rss_bytes", [2.0**30], "pp512 of llama on R3: Peak memory 1024.0 MiB"),
        ("perplexity", [25.5, 25.6], "pp512 of llama on R3: Perplexity on device 25.550 ± 0.071"),
    ],
)
def test_other_metrics_are_shown_in_their_units(
    metric: str, values: list[float], words: str
) -> None:
    assert format_table([_row(values, metric=metric)]) == [words]
