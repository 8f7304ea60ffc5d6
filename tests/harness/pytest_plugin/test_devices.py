"""Tests of users on real virtual devices: leases, skips, losses, and what reports say of them."""
# ruff: noqa: F401, F811 - a fixture of another module

from pathlib import Path

import pytest

from harness.results.store import ResultsStore, RunFilter
from tests.harness.pytest_plugin.conftest import Farm
from tests.harness.runtimes.stopwatch import script

_ONE = """
import pytest

def test_first(device):
    assert device.shell(["echo", "a b"]).stdout == "a b\\n"

@pytest.mark.device(soc="SM8750")
def test_second(devices, pool):
    (only,) = devices
    (holder,) = [m for m in pool.members() if m.name == only.member]
    assert holder.state == "leased", holder

@pytest.mark.device(soc="SM9999")
def test_no_such_soc(device):
    raise AssertionError("runs nowhere")

@pytest.mark.device(count=3, tags="usb")
def test_too_many(devices):
    raise AssertionError("runs nowhere")

def test_without(): pass
"""


def test_a_requirement_leases_or_fails_at_once(farm: Farm, two_devices: tuple[str, str]) -> None:
    specs = [f"--device=virtual:{name}" for name in two_devices]
    outcome = farm(_ONE, *specs)
    assert outcome.returncode == 1, outcome.output
    assert outcome.counts() == {"tests": 5, "errors": 2}, outcome.output
    assert "no device of the pool meets soc=SM9999: none has the SoC SM9999" in outcome.output
    assert "no device of the pool meets tag=usb count=3: " in outcome.output
    properties = outcome.properties("test_first")
    assert properties["qnnfarm.soc"] == "SM8750"
    assert properties["qnnfarm.device"]
    assert "qnnfarm.device" not in outcome.properties("test_without")


@pytest.mark.needs("plugins.virtual_android")
@pytest.mark.parametrize(("missing", "counts"), [("", {"skipped": 4}), ("fail", {"errors": 4})])
def test_without_any_device_tests_skip(
    farm: Farm,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    missing: str,
    counts: dict[str, int],
) -> None:
    monkeypatch.setenv("QNNFARM_STATE_DIR", str(tmp_path / "state"))
    pool = tmp_path / "none.yaml"
    pool.write_text("devices: [{discover: virtual}]\n")
    outcome = farm(_ONE, f"--pool={pool}", "-rs", "-o", f"qnnfarm_missing_device={missing}")
    assert outcome.counts() == {"tests": 5, **counts}, outcome.output
    assert "the pool has no devices" in outcome.output


def test_a_requirement_that_others_do_not_meet_can_be_a_skip(
    farm: Farm, two_devices: tuple[str, str]
) -> None:
    outcome = farm(_ONE, f"--device=virtual:{two_devices[0]}", "-o", "qnnfarm_missing_device=skip")
    assert outcome.returncode == 0, outcome.output
    assert outcome.counts() == {"tests": 5, "skipped": 2}, outcome.output


_SPEEDS = """
from harness.workloads.bench import Bench
from harness.workloads.generate import Generate

def test_bench(session, recording, record_measurement):
    bench = Bench.of(prompt_tokens=8, new_tokens=4, repetitions=1)
    run = bench.run(session, recording()).output
    record_measurement.run(run, "decode_tokens_per_s", test="tg4")
    assert run.workload.runtime == "stopwatch"

def test_prompt(session):
    Generate.of(prompt="In the beginning").run(session)
"""


def test_another_runtime_runs_what_it_can(
    farm: Farm, two_devices: tuple[str, str], script: Path
) -> None:
    outcome = farm(
        _SPEEDS, f"--device=virtual:{two_devices[0]}", "--runtime=stopwatch", "--container", script
    )
    assert outcome.counts() == {"tests": 2, "failures": 1}, outcome.output
    assert "the runtime stopwatch cannot answer prompts" in outcome.output
    (row,) = [line for line in outcome.output.splitlines() if " tg4 " in line]
    assert row.split("|")[4].strip() == "stopwatch"


_RUNS = """
from harness.workloads.bench import Bench
from harness.workloads.generate import Generate

def test_prompt(session, record_measurement):
    first, again = (
        Generate.of(prompt="In the beginning", max_tokens=2).run(session).output for _ in range(2)
    )
    assert first.text == again.text
    assert {s.channel for s in again.telemetry} >= {"rss_bytes"}
    record_measurement("ttft_s", first.metrics["ttft_s"])
    record_measurement("ttft_s", again.metrics["ttft_s"])
    record_measurement("prefill_tokens_per_s", first.metrics["prefill_tokens_per_s"], test="pp3")

def test_bench(session, recording, record_measurement):
    bench = Bench.of(prompt_tokens=32, new_tokens=1, repetitions=1, warmup=1)
    run = bench.run(session, recording()).output
    record_measurement.run(run, "prefill_tokens_per_s", test="pp32")

def test_fails(session):
    result = Generate.of(prompt="In the beginning", max_tokens=1).run(session).output
    assert result.text == "no such text"
"""


def test_a_container_runs_and_what_it_measures_is_kept(
    farm: Farm, two_devices: tuple[str, str], small_bundle: Path, tmp_path: Path
) -> None:
    db = tmp_path / "results.db"
    outcome = farm(
        _RUNS, f"--device=virtual:{two_devices[0]}", "--container", small_bundle,
        "--qnnfarm-db", db,
    )  # fmt: skip
    assert outcome.counts() == {"tests": 3, "failures": 1}, outcome.output
    with ResultsStore.open(db, create=False) as store:
        runs = store.list_runs(RunFilter())
    by_id = {run.id: run for run in runs}
    assert [run.status for run in runs] == ["done"] * 3, runs
    name = small_bundle.name
    loose = {run.label: run for run in runs if run.workload.prompt_tokens is None}
    assert set(loose) == {"test_it.py::test_prompt", "pp3"}
    assert len(loose["test_it.py::test_prompt"].values("ttft_s")) == 2
    assert len(loose["pp3"].values("prefill_tokens_per_s")) == 1
    assert outcome.properties(f"test_prompt[{name}]")["qnnfarm.run"] == loose["pp3"].id
    bench = by_id[outcome.properties(f"test_bench[{name}]")["qnnfarm.run"]]
    assert len(bench.values("prefill_tokens_per_s")) == 1
    assert bench.label == "test_it.py::test_bench"

    assert "| model " in outcome.output
    rows = [line for line in outcome.output.splitlines() if line.startswith("| small_llama")]
    assert [row.split("|")[6].strip() for row in rows] == ["pp3", "pp32"]
    assert "its speed says nothing about hardware speed" in outcome.output

    failed = outcome.properties(f"test_fails[{name}]")
    evidence = Path(failed["qnnfarm.evidence"])
    device = f"virtual_{two_devices[0]}-"
    logs = {path.name.removeprefix(device): path for path in evidence.iterdir()}
    assert "runner log of" in outcome.output
    assert any("rss_bytes,bytes," in path.read_text() for path in logs.values()), logs
    assert {"logcat", "dmesg"} <= set(logs)


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("nothere", "no adb device 'nothere'"),
        pytest.param(
            "virtual:nothere",
            "no virtual device 'nothere'",
            marks=pytest.mark.needs("plugins.virtual_android"),
        ),
    ],
)
def test_a_device_that_is_not_there_fails_the_tests_that_need_it_in_a_line(
    farm: Farm, device: str, words: str
) -> None:
    text = "def test_before(): pass\ndef test_needs_it(device): pass\n"
    done = farm(text, f"--device={device}", "-n0")
    assert "1 passed, 1 error" in done.output, done.output
    assert words in done.output
    assert "Traceback" not in done.output
