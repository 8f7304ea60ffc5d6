"""One rule for all commands, tried with each of them: docs/exit-codes.md."""

import subprocess
import sys
from pathlib import Path

import pytest

from harness.devices.adb.client import AdbServer
from harness.exit_codes import BAD, GOOD, MEANINGS, NO_ANSWER, verdict_exit_code
from harness.results.verdicts import Verdict
from tests.harness.cli.conftest import Run
from tests.harness.cli.test_bad_input import NO_COMPILER
from tests.harness.cli.test_commands import COMMANDS

_POOL = """
devices:
  - {name: here, type: local}
  - {name: gone, type: android, identifier: no-such-phone}
recovery: {steps: [reconnect], return_timeout_s: 0.1}
"""
_PLANS = {
    "good": "devices: [{name: here}]\nworkloads: [{kind: command, command: ['true']}]",
    "bad": "devices: [{name: here}]\nworkloads: [{kind: command, command: ['false']}]",
    "nowhere": "devices: [{soc: SM8650}]\nworkloads: [{kind: command, command: ['true']}]",
}
_DB = "--db results.db"

TABLE = (
    (GOOD, "--version"),
    (GOOD, "cache ls"),
    (GOOD, "cache verify"),
    (GOOD, "device ls"),
    (GOOD, "devices local"),
    (GOOD, "explain -6"),
    (GOOD, "libraries ls"),
    (GOOD, "pool drain here --reason x"),
    (GOOD, "pool history here"),
    (GOOD, "pool probe"),
    (GOOD, "pool release here"),
    (GOOD, "pool reserve here --for 1m"),
    (NO_ANSWER, "pool unreserve 99"),
    (GOOD, "pool show"),
    (GOOD, "pool test-notifications"),
    (GOOD, f"run good.yaml {_DB}"),
    (BAD, "devices local no-such-phone"),
    (BAD, "explain 7777"),
    (BAD, "doctor"),  # without the compiler, see below
    (BAD, "pool recover gone"),
    (BAD, f"run bad.yaml {_DB}"),
    (NO_ANSWER, ""),
    (NO_ANSWER, "no-such-command"),
    (NO_ANSWER, "alerts acknowledge 12ab --db nothing.db"),
    (NO_ANSWER, "alerts expect 12ab --db nothing.db"),
    (NO_ANSWER, "alerts fix 12ab --db nothing.db"),
    (NO_ANSWER, "alerts ls --db nothing.db"),
    (NO_ANSWER, "alerts reopen 12ab --db nothing.db"),
    (NO_ANSWER, "bench nothing"),
    (NO_ANSWER, f"bench nothing {_DB}"),
    (NO_ANSWER, "build nothing --target SM8750 --out out"),
    (NO_ANSWER, "bundle show nothing"),
    (NO_ANSWER, "aot compile -m nothing -c nothing --aot_config nothing"),
    (NO_ANSWER, "aot convert --input-path nothing --output-path out"),
    (NO_ANSWER, "aot init nothing"),
    (NO_ANSWER, "aot push -m nothing.bin -c nothing --build nothing --unchecked"),
    (NO_ANSWER, "aot quantize --model-path nothing --output-dir out"),
    (NO_ANSWER, "aot run -m nothing.bin -c nothing --prompt x"),
    (NO_ANSWER, "cache prune --to much"),
    (NO_ANSWER, "cache show nothing"),
    (NO_ANSWER, f"compare nothing nothing {_DB}"),
    (NO_ANSWER, "config check nothing"),
    (NO_ANSWER, "debug kv nothing"),
    (NO_ANSWER, "debug tensor nothing --reference nothing"),
    (NO_ANSWER, "demo --no-such-option"),
    (NO_ANSWER, "device fault nobody"),
    (NO_ANSWER, "device heat nobody"),
    (NO_ANSWER, "device power nobody"),
    (NO_ANSWER, "device rm nobody"),
    (NO_ANSWER, "device start n --soc SM1"),
    (NO_ANSWER, "device stop nobody"),
    (NO_ANSWER, "devices linux:-x"),
    (NO_ANSWER, "embed nothing text"),
    (NO_ANSWER, "evaluate nothing nothing"),
    (NO_ANSWER, "export nothing --out exported"),
    (NO_ANSWER, "gate --baseline previous --db nothing.db"),
    (NO_ANSWER, "generate nothing --prompt x"),
    (NO_ANSWER, "history decode --db nothing.db"),
    (NO_ANSWER, "import-container nothing --out container"),
    (NO_ANSWER, "inspect nothing"),
    (NO_ANSWER, "libraries fetch --no-such-option"),
    (NO_ANSWER, "nightly nothing.yaml"),
    (NO_ANSWER, "op-package check nothing --provider x"),
    (NO_ANSWER, "op-package run nothing --provider x --formula x"),
    (NO_ANSWER, "perplexity nothing --text nothing"),
    (NO_ANSWER, "pipeline bisect nothing.yaml"),
    (NO_ANSWER, "pipeline compare nothing.yaml"),
    (NO_ANSWER, "pipeline init nothing"),
    (NO_ANSWER, "pipeline run nothing.yaml"),
    (NO_ANSWER, "pipeline stages --no-such-option"),
    (NO_ANSWER, "pool recover nobody"),
    (NO_ANSWER, "pool show --pool nothing.yaml"),
    (NO_ANSWER, "pool undrain here"),
    (NO_ANSWER, "pool lease --name nobody"),
    (NO_ANSWER, "pool unquarantine here"),
    (NO_ANSWER, "profile nothing"),
    (NO_ANSWER, "conformance nothing --out out"),
    (NO_ANSWER, "rehearse nothing"),
    (NO_ANSWER, "report --db nothing.db"),
    (NO_ANSWER, "results export out.csv --db nothing.db"),
    (NO_ANSWER, "results import nothing.json --db nothing.db"),
    (NO_ANSWER, "results ls --db nothing.db"),
    (NO_ANSWER, "results prune --older-than 9d --db nothing.db"),
    (NO_ANSWER, "results show 12ab --db nothing.db"),
    (NO_ANSWER, "serve --tokens nothing"),
    (NO_ANSWER, f"run nothing.yaml {_DB}"),
    (NO_ANSWER, "train draft nothing --text nothing --out out"),
    (NO_ANSWER, "train forecast nothing --text nothing --out out"),
    (NO_ANSWER, "verify nothing"),
    (NO_ANSWER, "worker --db nothing.db"),
    (NO_ANSWER, f"run nowhere.yaml {_DB}"),
)


def test_every_command_is_in_the_table() -> None:
    groups = {command[:-1] for command in COMMANDS if command}
    tried = {tuple(line.split()) for _, line in TABLE}
    for command in set(COMMANDS) - groups:
        assert any(line[: len(command)] == command for line in tried), command


@pytest.mark.parametrize(("code", "line"), TABLE, ids=[line for _, line in TABLE])
def test_the_code_says_what_the_answer_is(
    qnnfarm: Run, adb_server: AdbServer, tmp_path: Path, code: int, line: str
) -> None:
    (tmp_path / "pool.yaml").write_text(_POOL)
    for name, plan in _PLANS.items():
        text = f"name: {name}\npool: pool.yaml\ntimeouts: {{lease_s: 5}}\n{plan}\n"
        (tmp_path / f"{name}.yaml").write_text(text)
    (tmp_path / "sitecustomize.py").write_text(NO_COMPILER)
    private = {"QNNFARM_STATE_DIR": str(tmp_path), "QNNFARM_POOL": str(tmp_path / "pool.yaml")}
    if line == "doctor":
        private["PYTHONPATH"] = str(tmp_path)
    words = [tmp_path / word if "." in word else word for word in line.split()]
    done = qnnfarm(*words, timeout_s=600, **private)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_a_bug_is_no_answer() -> None:
    program = "import harness.cli.app as app; app.build_app = lambda: 1 / 0; app.main()"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == NO_ANSWER
    assert "ZeroDivisionError" in done.stderr


@pytest.mark.parametrize(
    ("verdict", "code"),
    [
        (Verdict.REGRESSED, BAD),
        (Verdict.NO_VERDICT, NO_ANSWER),
        (Verdict.IMPROVED, GOOD),
        (Verdict.NO_DIFFERENCE, GOOD),
    ],
)
def test_the_code_of_a_verdict(verdict: Verdict, code: int) -> None:
    assert verdict_exit_code(verdict) == code


def test_the_help_tells_them(qnnfarm: Run) -> None:
    said = " ".join(qnnfarm("--help").stdout.split())
    for code, words in MEANINGS.items():
        assert f"{code} {words}" in said
