"""The recipes and examples of nightly.md, read by the programs that they are for."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from harness.plans.plan_file import NightlyEntry, load_plan
from plugins.nightly.messages import compose
from plugins.nightly.night import Night, NightFailure, Regression
from tests import system

_GUIDE = (Path(__file__).parents[3] / "plugins/nightly/nightly.md").read_text(encoding="utf-8")
_STUB = '#!/bin/sh\necho "$PWD $*" >> {log}\necho "night: bad"\nexit {code}\n'


def blocks(language: str) -> list[str]:
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```", _GUIDE)


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    """A folder that stands for `/lab`, whose `qnnfarm` says what it was asked, and ends with 1."""
    folder = tmp_path / "lab"
    program = folder / ".venv" / "bin" / "qnnfarm"
    program.parent.mkdir(parents=True)
    program.write_text(_STUB.format(log=folder / "log", code=1))
    program.chmod(0o755)
    return folder


def test_systemd_takes_the_units(lab: Path) -> None:
    units = []
    for kind, text in zip(("service", "timer"), blocks("ini"), strict=True):
        unit = lab / f"qnnfarm-nightly.{kind}"
        unit.write_text(text.replace("/lab", str(lab)))
        units.append(str(unit))
    program = system.program("systemd-analyze")
    done = subprocess.run(
        [program, "--man=no", "verify", *units], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    calendar = re.search(r"OnCalendar=(.*)", blocks("ini")[1])
    assert calendar is not None
    subprocess.run([program, "calendar", calendar[1]], check=True, capture_output=True)


def test_the_cron_line_runs_in_a_plain_shell(lab: Path) -> None:
    (table,) = [block for block in blocks("text") if "MAILTO" in block]
    (line,) = [line for line in table.splitlines() if "=" not in line]
    times, command = line.split("  ", 1)
    assert all(re.fullmatch(r"[\d,*-]+", field) for field in times.split())
    assert len(times.split()) == 5
    assert "%" not in command, "cron makes a newline of it"
    done = subprocess.run(
        ["/bin/sh", "-c", command.replace("/lab", str(lab))],
        env={"PATH": "/usr/bin:/bin", "HOME": str(lab)}, check=False, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert (lab / "log").read_text() == f"{lab} nightly nightly.yaml --quiet\n"


def test_github_takes_the_workflow_and_sees_its_exit_code(lab: Path) -> None:
    (text,) = [block for block in blocks("yaml") if "runs-on" in block]
    workflow = lab / "nightly.yml"
    workflow.write_text(text)
    linter = [sys.executable, "-m", "check_jsonschema"]
    subprocess.run(
        [*linter, "--builtin-schema", "vendor.github-workflows", str(workflow)], check=True
    )
    (step,) = [step for step in yaml.safe_load(text)["jobs"]["nightly"]["steps"] if "run" in step]
    assert step["shell"] == "bash"
    done = subprocess.run(  # as the runner calls it for `shell: bash`
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c",
         step["run"].replace("/lab", str(lab))],
        env=os.environ | {"GITHUB_STEP_SUMMARY": str(lab / "summary"), "AGAIN": "--again"},
        cwd=lab, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert (lab / "summary").read_text() == "night: bad\n"
    assert "--db /lab/results.db --again\n".replace("/lab", str(lab)) in (lab / "log").read_text()


def test_the_plan_of_the_guide_is_one(tmp_path: Path) -> None:
    (text,) = [block for block in blocks("yaml") if "workloads:" in block]
    (tmp_path / "plan.yaml").write_text(text)
    plan = load_plan(tmp_path / "plan.yaml")
    assert plan.containers[0].build is not None
    assert len(plan.nightly.tell) == 1


def test_the_message_of_the_guide_has_the_keys_of_real_ones() -> None:
    (text,) = blocks("json")
    shown = json.loads(text)
    night = Night.model_validate({**shown, "plan": "nightly", "name": shown["night"],
                                  "began_at": 0, "error": "", "report": True})  # fmt: skip
    real = json.loads(json.dumps(compose(night, NightlyEntry()).as_mapping()))
    assert shown.keys() == real.keys()
    assert shown["regressions"][0].keys() == Regression.model_fields.keys()
    assert shown["failures"][0].keys() == NightFailure.model_fields.keys()
    assert shown["text"].startswith("nightly 2026-11-22: new regression: decode_tokens_per_s of")
