"""Several processes, and several sessions: who holds which device when."""

from pathlib import Path

import pytest

from harness.results.store import ResultsStore
from tests.harness.pytest_plugin.conftest import Farm

_REUSE = """
import pytest

tokens = []

def _token(pool, device):
    (member,) = [m for m in pool.members() if m.name == device.member]
    tokens.append(member.token)

def test_a(pool, device): _token(pool, device)
def test_b(pool, device): _token(pool, device)
def test_between(pool): assert all(m.state == "ready" for m in pool.members())
def test_c(pool, device): _token(pool, device)
@pytest.mark.device(soc="SM8750")
def test_d(pool, device): _token(pool, device)

def test_leases(pool):
    assert len(tokens) % 4 == 0
    for number in range(0, len(tokens), 4):
        a, b, c, d = tokens[number : number + 4]
        assert a == b and len({a, c, d}) == 3
"""


def test_tests_that_need_the_same_share_a_lease(farm: Farm, two_devices: tuple[str, str]) -> None:
    outcome = farm(_REUSE, f"--device=virtual:{two_devices[0]}")
    assert outcome.counts() == {"tests": 6}, outcome.output


_REPEATED = """
held = []

def test_a(pool, device):
    held.append(("a", next(m.token for m in pool.members() if m.name == device.member)))

def test_b(pool, device):
    held.append(("b", next(m.token for m in pool.members() if m.name == device.member)))

def test_once(): pass

def test_end(pool):
    assert [name for name, _ in held] == ["a", "b"] * 3
    tokens = [token for _, token in held]
    assert tokens[::2] == tokens[1::2] and len(set(tokens)) == 3
"""


def test_repeat_runs_sessions_one_after_the_other(farm: Farm, two_devices: tuple[str, str]) -> None:
    outcome = farm(_REPEATED, f"--device=virtual:{two_devices[0]}", "--repeat", "3")
    assert outcome.counts() == {"tests": 8}, outcome.output
    assert outcome.properties("test_a[session2]")["qnnfarm.session"] == "1"


_WORKERS = """
import os, time
from pathlib import Path
import pytest
from harness.workloads.bench import Bench

@pytest.mark.parametrize("n", range(6))
def test_alone_on_its_device(device, n):
    mine = Path(f"held-{device.member}")
    mine.touch(exist_ok=False)
    Path(f"used-{os.environ['PYTEST_XDIST_WORKER']}-{device.member}").touch()
    while len(list(Path().glob("used-*"))) < 2:  # each worker has a device at once
        time.sleep(0.05)
    mine.unlink()

def test_fails(device):
    assert device.member == "x"

def test_measures(session, recording, record_measurement):
    bench = Bench.of(prompt_tokens=32, new_tokens=1, repetitions=1, warmup=0)
    run = bench.run(session, recording()).output
    record_measurement.run(run, "prefill_tokens_per_s", test="pp32")
"""


@pytest.mark.variant
def test_workers_of_xdist_share_the_pool(
    farm: Farm, two_devices: tuple[str, str], small_bundle: Path, pytester: pytest.Pytester
) -> None:
    specs = [f"--device=virtual:{name}" for name in two_devices]
    outcome = farm(
        _WORKERS, *specs, "-n2", "--dist=load", "--container", small_bundle, "--repeat=2"
    )
    assert outcome.counts() == {"tests": 16, "failures": 2}, outcome.output
    assert "dmesg of" in outcome.output
    used = {path.name.partition("-")[2] for path in pytester.path.glob("used-*")}
    assert {name.partition("-")[2] for name in used} == set(two_devices), used
    assert not list(pytester.path.glob("held-*"))
    rows = [line for line in outcome.output.splitlines() if line.startswith("| small_llama")]
    assert {row.split("|")[6].strip() for row in rows} == {"pp32"}, outcome.output
    (db,) = (pytester.path / "tmp").glob("qnnfarm-results.db")
    with ResultsStore.open(db, create=False) as store:
        runs = store.list_runs()
    assert sorted(run.session for run in runs) == [0, 1]
