"""`qnnfarm run` from end to end: real devices, a real container, and what a crash leaves."""

import contextlib
import getpass
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.devices.adb.client import AdbServer
from harness.devices.adb.transport import AdbTransport
from harness.devices.device import Device
from harness.errors import StoreError
from harness.pool.pool import Pool
from harness.pool.states import MemberState
from harness.results.store import ResultsStore, RunFilter
from plugins.virtual_android import manager
from plugins.virtual_android.faults import ALWAYS, Stall
from tests import command_line, waiting
from tests.command_line import Started

pytestmark = pytest.mark.timeout(900)
_PATIENCE_S = 250
"""No command takes so long, however slow the machine is."""
MakeDevice = Callable[..., tuple[manager.VirtualDevice, Device]]
Start = Callable[..., Started]


class Lab:
    """Two devices, a pool file that names them, and plans in a folder."""

    def __init__(self, folder: Path, devices: list[tuple[manager.VirtualDevice, Device]]) -> None:
        self.folder = folder
        self.devices = [device for _, device in devices]
        self.virtual = [virtual for virtual, _ in devices]
        self.db = folder / "results.db"
        lines = ["devices:"]
        for device in self.devices:
            lines += ["  - type: android", f"    identifier: {device.serial}"]
        (folder / "pool.yaml").write_text("\n".join(lines) + "\n")

    def plan(self, **keys: object) -> Path:
        path = self.folder / "plan.yaml"
        content = {"name": "lab", "db": "results.db", "pool": "pool.yaml", **keys}
        path.write_text(json.dumps(content))  # JSON is YAML
        return path

    def runs(self) -> list[tuple[str, str]]:
        """Label and status of each run; none while there is no database yet."""
        with contextlib.suppress(StoreError), ResultsStore.open(self.db, create=False) as store:
            return [(run.label, run.status) for run in store.list_runs(RunFilter())]
        return []

    def processes(self, device: Device, word: str) -> list[str]:
        script = 'for p in /proc/[0-9]*; do tr "\\0" " " <$p/cmdline; echo; done 2>/dev/null'
        lines = device.shell(script, check=False).stdout.splitlines()
        return [line for line in lines if word in line and "cmdline" not in line]


@pytest.fixture
def lab(
    tmp_path: Path,
    two_devices: tuple[manager.VirtualDevice, ...],
    adb_server: AdbServer,
    monkeypatch: pytest.MonkeyPatch,
) -> Lab:
    """Devices of all tests, and a ledger of each test's own."""
    monkeypatch.setenv("QNNFARM_LEDGER", str(tmp_path / "pool.db"))
    devices = [(one, Device(AdbTransport(adb_server, one.serial))) for one in two_devices]
    return Lab(tmp_path, devices)


@pytest.fixture
def start(adb_environment: Path) -> Iterator[Start]:
    """Starts `qnnfarm run ARGUMENT...`; ends what a test leaves."""
    started: list[Started] = []

    def run(*arguments: str | Path) -> Started:
        variables = os.environ | {"COLUMNS": "160"}
        process = Started("run", *arguments, cwd=adb_environment, env=variables)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def finish(process: Started) -> tuple[dict[str, object], str]:
    out, err = process.communicate(timeout=_PATIENCE_S)
    return json.loads(out) if out.startswith("{") else {"text": out}, err


def by_label(answer: dict[str, object]) -> dict[str, dict[str, object]]:
    cells = answer["cells"]
    assert isinstance(cells, list)
    return {cell["cell"]: cell for cell in cells}


def wait_for(condition: Callable[[], object], process: Started) -> None:
    def holds() -> object:
        assert process.poll() is None, process.communicate()
        return condition()

    waiting.wait_for(holds)


SLOW = {"kind": "command", "label": "slow", "command": ["sleep", "613"]}
QUICK = {"kind": "command", "label": "quick", "command": ["echo", "it's $HOME"]}


def test_a_matrix_of_all_kinds_of_work_is_measured(
    lab: Lab, start: Start, small_bundle: Path
) -> None:
    text = lab.folder / "text.txt"
    text.write_text("In the beginning God created the heaven and the earth. " * 60)
    plan = lab.plan(
        containers=[{"path": str(small_bundle), "label": "tiny"}],
        devices=[{"soc": "SM8750", "label": "phone"}],
        workloads=[
            {"kind": "bench", "prompt_tokens": 16, "new_tokens": 4, "repetitions": 1,
             "warmup": 0, "sessions": 2},
            {"kind": "perplexity", "text": "text.txt", "windows": 1},
            {"kind": "generate", "label": "wrong", "prompt": "In the beginning", "max_tokens": 4,
             "expect": "Klaatu barada nikto"},
            QUICK,
        ],
        trace=True,
    )  # fmt: skip
    answer, err = finish(start(plan, "--json"))
    cells = by_label(answer)
    assert {label: cell["status"] for label, cell in cells.items()} == {
        "tiny/phone/bench#1": "done",
        "tiny/phone/bench#2": "done",
        "tiny/phone/perplexity": "done",
        "tiny/phone/wrong": "failed",
        "phone/quick": "done",
    }, err
    assert answer["exit_code"] == 1
    wrong = cells["tiny/phone/wrong"]["failures"]
    assert [failure["error"] for failure in wrong] == ["OutputCheckError"]  # type: ignore[attr-defined]
    assert "prefill_tokens_per_s" in cells["tiny/phone/bench#1"]["values"]  # type: ignore[operator]
    with ResultsStore.open(lab.db, create=False) as store:
        runs = store.list_runs(RunFilter())
        (failed,) = (run for run in runs if run.status == "failed")
        kept = {artifact.name for artifact in store.artifacts(failed.id)}
    assert kept >= {"run.log", "dmesg.txt", "profiles.jsonl", "traces.jsonl.gz"}
    assert cells["tiny/phone/wrong"]["failed_run"] == failed.id
    assert answer["logs"] is None  # they are kept with the run
    assert sorted(run.status for run in runs) == ["done"] * 3 + ["failed"]
    bench = [run for run in runs if run.kind == "bench"]
    assert len({run.group_id for run in bench}) == 1
    assert [run.session for run in sorted(bench, key=lambda r: r.session)] == [0, 1]
    for device in lab.devices:
        listed = device.shell(["ls", f"{device.work_root}/runs"], check=False).stdout
        assert listed.split() == []

    # Again: what is done is not repeated, what failed is tried again.
    answer, err = finish(start(plan, "--json"))
    assert "4 of 5 cells are done" in err
    resumed = {label: cell["resumed"] for label, cell in by_label(answer).items()}
    assert resumed.pop("tiny/phone/wrong") is False
    assert set(resumed.values()) == {True}
    assert len(lab.runs()) == 5


def test_a_script_that_hangs_fails_and_puts_no_device_out(lab: Lab, start: Start) -> None:
    hangs = {"kind": "command", "label": "hangs", "command": ["sleep", "617"], "sessions": 3}
    answer, err = finish(start(lab.plan(workloads=[hangs], timeouts={"cell_s": 1}), "--json"))
    assert answer["exit_code"] == 1, err
    for cell in by_label(answer).values():
        failures: list[dict[str, str]] = cell["failures"]  # type: ignore[assignment]
        assert cell["status"] == "failed"
        assert 1 <= len(failures) <= 2  # of three tries
        assert failures[-1]["kind"] == "runner"
        assert "took longer than 1 s; it fails alike on" in failures[-1]["reason"]
        assert failures[-1]["reason"].endswith("the cell is at fault, not the devices")
    with Pool.open(lab.folder / "pool.yaml") as pool:
        members = pool.members()
        assert [(m.state, m.failures) for m in members] == [(MemberState.READY, ())] * 2
        told = [entry.text for member in members for entry in pool.history(member.name)]
    assert any("cell any/hangs#" in text and "fails alike on" in text for text in told), told


def test_waiting_for_devices_is_explained(lab: Lab, start: Start) -> None:
    with Pool.open(lab.folder / "pool.yaml") as pool:
        first, second = (member.name for member in pool.members())
        for name in (first, second):
            pool.admin.drain(name, "swollen")
        process = start(lab.plan(workloads=[QUICK]))
        said: list[str] = []
        patience = threading.Timer(250, process.kill)  # so that it ends if nothing is ever said
        patience.start()
        while "swollen" not in "".join(said):
            said.append(process.stderr.readline())
            assert said[-1], said
        patience.cancel()
        assert len(said) == 1
        user = getpass.getuser()
        assert said[0].startswith(
            f"waiting for any device: {first} is draining (swollen ({user})) since "
        )
        assert f"; {second} is draining (swollen ({user})) since " in said[0]
        pool.admin.drain(second, "a new battery")  # drained already: nothing is another now
        pool.admin.undrain(first)
    out, err = process.communicate(timeout=_PATIENCE_S)
    assert process.returncode == 0, err
    assert f"{first} is draining" not in err
    assert "results in" in out


@pytest.fixture
def refused(adb_environment: Path, tmp_path: Path) -> Callable[..., str]:
    """Runs a plan that cannot be used, in both ways; gives what is said of it."""

    def run(content: dict[str, object], *options: str) -> str:
        folder = tmp_path / "deep" / "plans"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "plan.yaml"
        path.write_text(json.dumps({"name": "p", "db": "results.db", **content}))
        said = []
        for way in ([], ["--dry-run"]):
            done = command_line.qnnfarm("run", path, *options, *way, cwd=adb_environment)
            assert (done.returncode, done.stdout) == (2, ""), done.stderr
            assert done.stderr.count("\n") == 1
            assert ".." not in done.stderr
            said.append(done.stderr)
        assert not list(tmp_path.rglob("results.db"))
        assert said[0] == said[1]
        return said[0].removeprefix(f"qnnfarm: {path}, ").strip()

    return run


def test_a_plan_that_cannot_be_used_is_refused_before_anything_runs(
    refused: Callable[..., str], tmp_path: Path, small_bundle: Path
) -> None:
    bench: dict[str, object] = {"kind": "bench"}
    missing = {"containers": [{"path": "../../no/such"}], "workloads": [bench]}
    assert refused(missing).startswith(f"containers[0].path: container {tmp_path}/no/such: ")
    quick: dict[str, object] = {"workloads": [QUICK]}
    there = f"there is no folder {tmp_path}/none"
    assert refused({**quick, "db": "../../none/results.db"}) == f"db: {there}"
    assert refused(quick, "--db", f"{tmp_path}/none/r.db") == f"qnnfarm: --db: {there}"
    file = f"{tmp_path}/pool.yaml"
    assert refused({**quick, "pool": "../../pool.yaml"}) == f"pool: there is no file {file}"
    missing_pool = f"qnnfarm: {file}: cannot be read: No such file or directory"
    assert refused(quick, "--pool", file) == missing_pool
    (tmp_path / "pool.yaml").write_text("device: []\n")
    assert refused(quick, "--pool", file) == (
        f"qnnfarm: {file}, line 1, device: unknown key: did you mean devices?"
    )
    long = {
        "containers": [{"path": str(small_bundle)}],
        "workloads": [{**bench, "prompt_tokens": 500}],
    }
    assert refused(long).startswith("workloads[0].prompt_tokens: ")


def test_after_a_kill_it_goes_on_and_repeats_nothing(
    lab: Lab, start: Start, small_bundle: Path
) -> None:
    plan = lab.plan(
        containers=[{"path": str(small_bundle), "label": "tiny"}],
        workloads=[
            {"kind": "bench", "prompt_tokens": 16, "new_tokens": 4, "repetitions": 1,
             "warmup": 0, "sessions": 2},
        ],
        conditions="none",
        telemetry=False,
    )  # fmt: skip
    answer, err = finish(start(plan, "--only", "*#1", "--json"))
    assert answer["exit_code"] == 0, err
    for virtual in lab.virtual:  # so that the next cell does not end before it is looked at
        manager.control(virtual.name).inject(Stall(when="run", count=ALWAYS))
    process = start(plan, "--max-parallel", "1")
    wait_for(lambda: "running" in {status for _, status in lab.runs()}, process)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=_PATIENCE_S)
    for virtual in lab.virtual:
        manager.control(virtual.name).clear()
    assert sorted(status for _, status in lab.runs()) == ["done", "interrupted"]

    answer, err = finish(start(plan, "--json"))
    assert answer["exit_code"] == 0, err
    assert "resuming: 1 of 2 cells are done; 1 were interrupted and run again" in err
    after = lab.runs()
    assert sorted(label for label, status in after if status == "done") == [
        f"tiny/any/bench#{n}" for n in range(1, 3)
    ]
    assert sum(status == "interrupted" for _, status in after) == 1


def test_an_interrupt_leaves_no_process_and_no_lease(lab: Lab, start: Start) -> None:
    plan = lab.plan(workloads=[{**SLOW, "sessions": 4}])
    dry, _ = finish(start(plan, "--dry-run"))
    assert "any/slow#4" in str(dry["text"])
    assert not lab.db.exists()
    process = start(plan)
    wait_for(lambda: all(lab.processes(d, "sleep 613") for d in lab.devices), process)
    second = start(plan)
    _, err = second.communicate(timeout=_PATIENCE_S)
    assert second.returncode == 2
    assert "another `qnnfarm run` works on this plan" in err

    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=_PATIENCE_S)
    assert process.returncode == 130, err
    assert "4 left" in out
    assert "the same command runs the cells that are not done" in out
    assert "stopping" in err
    for device in lab.devices:
        assert lab.processes(device, "sleep 613") == []
    with Pool.open(lab.folder / "pool.yaml") as pool:
        assert [(m.state, m.holder) for m in pool.members()] == [(MemberState.READY, "")] * 2


def test_a_device_that_goes_away_costs_no_cell(
    tmp_path: Path, make_virtual_device: MakeDevice, start: Start
) -> None:
    lab = Lab(tmp_path, [make_virtual_device(), make_virtual_device()])
    gate = 'while [ ! -e "$HOME/go" ]; do sleep 0.1; done; echo went'
    plan = lab.plan(
        workloads=[{"kind": "command", "label": "gate", "command": ["sh", "-c", gate],
                    "sessions": 4}],
    )  # fmt: skip
    process = start(plan, "--json")
    wait_for(lambda: all(lab.processes(d, "$HOME/go") for d in lab.devices), process)
    manager.stop(lab.virtual[0].name)
    lab.devices[1].shell('touch "$HOME/go"')
    answer, err = finish(process)
    assert answer["exit_code"] == 0, err
    cells = by_label(answer)
    assert len({cell["device"] for cell in cells.values()}) == 1
    lost = [failure for cell in cells.values() for failure in cell["failures"]]  # type: ignore[attr-defined]
    assert len(lost) == 1
    assert "retry" in err


def test_the_end_of_a_plan_is_told_and_logs_are_kept_until_a_fresh_start(
    lab: Lab, start: Start
) -> None:
    told = lab.folder / "told"
    with (lab.folder / "pool.yaml").open("a") as pool:
        pool.write(f"notifications:\n  - command: [sh, -c, 'cat > {told}']\n")
    command = {"kind": "command", "command": ["sh", "-c", "exit 3"]}
    plan = lab.plan(devices=[{"type": "android"}], workloads=[command])
    answer, _ = finish(start(plan, "--json"))
    assert answer["exit_code"] == 1
    message = json.loads(told.read_text())
    assert (message["event"], message["subject"]) == ("plan_finished", "lab")
    assert message["text"].startswith("plan lab: 0 done, 1 failed, 0 left in ")
    logs = Path(str(answer["logs"]))
    assert {path.name for path in logs.glob("*/*/*")} >= {"failure.txt", "dmesg.txt"}
    assert "failed with status 3" in next(logs.glob("*/*/failure.txt")).read_text()
    lab.plan(devices=[{"type": "android"}], workloads=[{"kind": "command", "command": ["true"]}])
    answer, _ = finish(start(plan, "--json", "--fresh"))
    assert answer["logs"] is None
    assert not logs.exists()
