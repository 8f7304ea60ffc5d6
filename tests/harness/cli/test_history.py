"""`qnnfarm history` and `qnnfarm alerts` on a history with a loss."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from harness.exit_codes import NO_ANSWER
from harness.results.metrics import Measurement
from harness.results.records import (
    ContainerInfo,
    DeviceInfo,
    Provenance,
    Run,
    WorkloadRecord,
)
from harness.results.store import ResultsStore
from tests.command_line import Done, qnnfarm

FIRST = datetime(2026, 1, 1, 22, tzinfo=UTC)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Has `results.db`: 20 nights at 50 tokens/s and three at 40, with another Genie."""
    return write(tmp_path, [50.0] * 20 + [40.0] * 3)


def write(folder: Path, levels: Sequence[float]) -> Path:
    """Write a session a night, with another Genie from night 20 on."""
    with ResultsStore.open(folder / "results.db") as store:
        for night, level in enumerate(levels):
            value = level + (0.3, -0.2, 0.1, -0.3)[night % 4]
            run = Run(
                kind="bench",
                status="done",
                created_at=FIRST + timedelta(days=night),
                container=ContainerInfo(
                    model="my-\r\nllama\x1b[31m", sha256="a" * 64, target="SM8750", ars=(1, 128),
                    cl=4096, n_splits=2, precision="W4A16",
                ),
                device=DeviceInfo(serial="R5CX", soc="SM8750", emulator=False),
                workload=WorkloadRecord(
                    runner="genie-t2t-run", prompt_tokens=64, max_new_tokens=16
                ),
                provenance=Provenance(
                    toolchain="ort_qnn", toolchain_versions={}, qnnfarm_version="0.1.0",
                    library_versions={"genie": "1.21" if night < 20 else "1.22"},
                    host="bench-1", git_commit=f"{night:02d}" * 20,
                ),
                measurements=(Measurement(metric="decode_tokens_per_s", value=value),),
            )  # fmt: skip
            store.write_run(run)
    return folder


def command(folder: Path, *words: str) -> Done:
    return qnnfarm(*words, cwd=folder, env={"PATH": "", "COLUMNS": "120"})


def test_a_history_shows_its_changes(folder: Path) -> None:
    shown = command(folder, "history", "decode")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("Decode of my- llama␛[31m W4A16, AR 1, 128")
    assert "loss: -19.7%" in shown.stdout
    assert "found 2026-01-22; commits 1919191919..2020202020; genie 1.21 → 1.22" in shown.stdout
    assert "23 nights, 23 sessions on 1 device, 1 change" in shown.stdout
    assert "\x1b" not in shown.stdout
    (series,) = json.loads(command(folder, "history", "decode_tokens_per_s", "--json").stdout)
    assert len(series["nights"]) == 23
    assert series["changes"][0]["commits"] == ["19" * 20, "20" * 20]
    nothing = command(folder, "history", "decode", "--model", "other")
    assert nothing.returncode == NO_ANSWER
    assert "no history of decode_tokens_per_s with these options" in nothing.stderr
    assert command(folder, "history", "p").returncode == NO_ANSWER  # prefill or perplexity?


def test_a_history_says_what_it_cannot_see(folder: Path) -> None:
    shown = command(folder, "history", "decode").stdout
    assert "A loss under 3.6% would not be seen in 3 nights" in shown
    (series,) = json.loads(command(folder, "history", "decode", "--json").stdout)
    assert series["smallest_loss"] == pytest.approx(0.0364, abs=1e-3)


def test_a_history_shows_what_it_refutes(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).normal(0, 0.015, 40)
    levels = np.array([50.0] * 20 + [46.0] * 3 + [50.0] * 17)
    write(tmp_path, (levels * np.exp(noise)).tolist())
    shown = command(tmp_path, "history", "decode", "--nights", "40").stdout
    assert "no change" in shown
    assert "from here on, found 2026-01-22, refuted 2026-01-27: back by itself" in shown
    (series,) = json.loads(command(tmp_path, "history", "decode", "--json").stdout)
    assert series["changes"] == []
    (refuted,) = series["refuted"]
    assert refuted["began"].startswith("2026-01-21")


def test_an_alert_is_settled_by_a_command(folder: Path) -> None:
    (alert,) = json.loads(command(folder, "alerts", "ls", "--json").stdout)
    assert (alert["state"], alert["metric"]) == ("open", "decode_tokens_per_s")
    done = command(folder, "alerts", "expect", alert["id"][:6], "--note", "the new Genie")
    assert done.returncode == 0, done.stderr
    assert "0 alerts" in command(folder, "alerts", "ls").stdout
    assert "the new Genie" in command(folder, "alerts", "ls", "--all").stdout
    assert command(folder, "alerts", "fix", "zz").returncode == NO_ANSWER


def test_a_missing_database_is_not_created(tmp_path: Path) -> None:
    assert command(tmp_path, "alerts", "ls").returncode == NO_ANSWER
    assert command(tmp_path, "history", "decode").returncode == NO_ANSWER
    assert list(tmp_path.iterdir()) == []
