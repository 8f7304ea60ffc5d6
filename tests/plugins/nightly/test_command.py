"""`qnnfarm nightly` as its users run it: a real build, a real device, a real report."""

import json
import os
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from harness.devices.device import Device
from harness.results.store import ResultsStore
from suites.models import tiny_llama
from tests import command_line

BUILD = {
    "model": str(tiny_llama.folder()), "target": "SM8750:emulator", "ar": [1, 32], "cl": 192,
    "splits": 2,
}  # fmt: skip
BENCH = {
    "kind": "bench", "prompt_tokens": 16, "new_tokens": 3, "repetitions": 1, "warmup": 0,
}  # fmt: skip
TOLD = [{"command": [sys.executable, "-c", "import sys; open('told', 'a').write(input() + '\\n')"]}]


class Lab:
    def __init__(self, folder: Path, serial: str, cache: Path) -> None:
        self.folder = folder
        self._cache = cache
        self._evening = datetime.now(UTC).hour - 18  # hours behind UTC where it is evening now
        pool = {"devices": [{"type": "android", "identifier": serial, "name": "dut"}]}
        (folder / "pool.yaml").write_text(json.dumps(pool))

    def plan(self, **keys: object) -> Path:
        content = {
            "name": "lab",
            "db": "results.db",
            "pool": "pool.yaml",
            "conditions": "none",
            "nightly": {"tell": TOLD},
        }
        path = self.folder / "plan.yaml"
        path.write_text(json.dumps(content | keys))  # JSON is YAML
        return path

    def environment(self) -> dict[str, str]:
        zone = {"TZ": f"EVENING{self._evening:+}"}  # else a test that noon meets has two nights
        return os.environ | zone | {"QNNFARM_CACHE_DIR": str(self._cache), "COLUMNS": "120"}

    def run(self, *arguments: str) -> tuple[int, str, str]:
        done = command_line.qnnfarm(
            "nightly", "plan.yaml", *arguments, cwd=self.folder, env=self.environment()
        )
        return done.returncode, done.stdout, done.stderr

    @property
    def told(self) -> list[dict[str, object]]:
        path = self.folder / "told"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def lab(tmp_path: Path, virtual_device: Device, build_cache: Path) -> Lab:
    return Lab(tmp_path, virtual_device.serial, build_cache)


@pytest.mark.timeout(900)
@pytest.mark.needs("libatomic1")
def test_a_night_builds_runs_reports_and_is_over(lab: Lab) -> None:
    lab.plan(
        containers=[{"path": "built/head", "label": "head", "build": BUILD}], workloads=[BENCH]
    )
    code, out, err = lab.run("--json")
    assert code == 0, err
    night = json.loads(out)
    assert (night["verdict"], night["cells"]["done"]) == ("good", 1)
    (container,) = night["containers"]
    assert container["changed"]
    report = Path(night["report"]).read_text()
    assert "<html" in report
    assert "what its pool says of it" in report
    assert night["name"] in (lab.folder / "lab-reports" / "index.html").read_text()

    code, out, err = lab.run("--quiet")
    assert (code, out, err, lab.told) == (0, "", "", [])
    with ResultsStore.open(lab.folder / "results.db", create=False) as store:
        (run,) = store.list_runs()
    assert run.container.sha256 == container["sha256"]


def test_an_error_is_notified_once_and_printed_each_time(lab: Lab, tiny_bundle: Path) -> None:
    lab.plan(
        containers=[
            {"path": "built/head", "build": BUILD | {"model": "nowhere"}},
            {"path": str(tiny_bundle), "label": "given"},
        ],
        exclude=[{"container": "given"}],
        workloads=[
            BENCH,
            {"kind": "command", "label": "alive", "command": ["true"]},
            {"kind": "command", "label": "broken", "command": ["false"]},
        ],
    )
    code, out, _ = lab.run("--quiet")
    assert code == 1
    assert "2 not measured\n  not measured: build head: " in out
    (told,) = lab.told
    assert told["failures"][1]["cell"] == "any/broken"  # type: ignore[index]
    assert told["cells"] == {"done": 1, "failed": 1, "left": 0}
    assert lab.run("--quiet")[:2] == (1, out)
    assert lab.run("--again", "--quiet") == (1, "", "")
    assert len(lab.told) == 1


def test_a_night_that_is_cut_off_keeps_what_it_measured(lab: Lab, virtual_device: Device) -> None:
    held = "until [ -e $TMPDIR/go ]; do sleep 0.1; done"
    lab.plan(
        workloads=[
            {"kind": "command", "label": "quick", "command": ["true"]},
            {"kind": "command", "label": "slow", "command": ["sh", "-c", held]},
        ]
    )
    process = command_line.Started("nightly", "plan.yaml", cwd=lab.folder, env=lab.environment())
    for line in process.stderr:
        if "done any/quick" in line:
            break
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=200)
    assert process.returncode == 130
    assert "was cut off: what is measured is kept" in said
    virtual_device.shell("touch $TMPDIR/go")
    code, out, err = lab.run()
    assert code == 0, err
    assert "all is well, 2 cells done" in out
    assert "done any/quick" not in err
    virtual_device.shell("rm $TMPDIR/go")


def test_receivers_can_be_tested(lab: Lab) -> None:
    lab.plan(workloads=[{"kind": "command", "command": ["true"]}])
    code, _, err = lab.run("--test-notifications")
    assert (code, [told["event"] for told in lab.told]) == (0, ["test"]), err
    lab.plan(
        workloads=[{"kind": "command", "command": ["true"]}],
        nightly={"tell": [{"command": ["/nowhere"]}]},
    )
    code, _, err = lab.run("--test-notifications")
    assert code == 1
    assert "no notification to /nowhere: " in err
    assert not (lab.folder / "lab-reports").exists()


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"nightly": {"keep": 0}}, "nightly.keep"),
        ({"nightly": {"tell": [{}]}}, "nightly.tell[0].command"),
        ({"nightly": {"url": "file:///etc"}}, "nightly.url"),
        ({"containers": [{"path": "a", "build": {"model": "m"}}]}, "containers[0].build.target"),
        ({"containers": [{"path": "a", "build": BUILD | {"ar": [0]}}]}, "containers[0].build.ar"),
    ],
)
def test_a_plan_that_cannot_be_used_says_where(
    tmp_path: Path, adb_environment: Path, keys: dict[str, object], complaint: str
) -> None:
    lab = Lab(tmp_path, "none", tmp_path)
    lab.plan(workloads=[BENCH], **keys)
    code, out, err = lab.run()
    assert (code, out) == (2, "")
    assert complaint in err
    assert err.count("\n") == 1
