"""`qnnfarm history` and `qnnfarm alerts` on a history with a loss."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from harness.errors import NO_ANSWER
from harness.results.metrics import Measurement
from harness.results.records import DeviceInfo
from harness.results.store import ResultsStore
from tests.harness.cli.conftest import Run
from tests.harness.results.places import make_run

FIRST = datetime(2026, 1, 1, 22, tzinfo=UTC)
LOSS = [50.0] * 20 + [40.0] * 3


@pytest.fixture
def nights(tmp_path: Path) -> None:
    """Stores 20 nights at 50 tokens/s and three at 40, with another Genie."""
    write(tmp_path, LOSS)


def write(folder: Path, levels: Sequence[float]) -> None:
    """Write a session a night into `results.db`, with another Genie from night 20 on."""
    base = make_run()
    model = {"model": "my-\r\nllama\x1b[31m", "precision": "W4A16", "ars": (1, 128), "cl": 4096}
    with ResultsStore.open(folder / "results.db") as store:
        for night, level in enumerate(levels):
            value = level + (0.3, -0.2, 0.1, -0.3)[night % 4]
            libraries = {"genie": "1.21" if night < 20 else "1.22"}
            source = {"library_versions": libraries, "git_commit": f"{night:02d}" * 20}
            store.write_run(
                make_run(
                    status="done",
                    created_at=FIRST + timedelta(days=night),
                    container=base.container.model_copy(update=model),
                    device=DeviceInfo(serial="R5CX", soc="SM8750", emulator=False),
                    provenance=base.provenance.model_copy(update=source),
                    measurements=(Measurement(metric="decode_tokens_per_s", value=value),),
                )
            )


def test_a_history_shows_its_changes(qnnfarm: Run, nights: None) -> None:
    shown = qnnfarm("history", "decode")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("Decode of my- llama␛[31m W4A16, AR 1, 128")
    assert "loss: -19.7%" in shown.stdout
    assert "found 2026-01-22; commits 1919191919..2020202020; genie 1.21 → 1.22" in shown.stdout
    assert "23 nights, 23 sessions on 1 device, 1 change" in shown.stdout
    assert "A loss under 3.2% would not be seen in 3 nights" in shown.stdout
    assert "\x1b" not in shown.stdout
    (series,) = json.loads(qnnfarm("history", "decode_tokens_per_s", "--json").stdout)
    assert len(series["nights"]) == 23
    assert series["smallest_loss"] == pytest.approx(0.0325, abs=1e-3)
    assert series["changes"][0]["commits"] == ["19" * 20, "20" * 20]
    nothing = qnnfarm("history", "decode", "--model", "other")
    assert nothing.returncode == NO_ANSWER
    assert "no history of decode_tokens_per_s with these options" in nothing.stderr
    assert qnnfarm("history", "p").returncode == NO_ANSWER  # prefill or perplexity?


def test_a_history_says_what_it_takes_to_see_a_loss(qnnfarm: Run, tmp_path: Path) -> None:
    write(tmp_path, [50.0] * 20)
    shown = qnnfarm("history", "decode", "--to-see", "10")
    assert "to see a loss of 10% in 3 nights here: 1 session a night" in shown.stdout
    (series,) = json.loads(qnnfarm("history", "decode", "--to-see", "10", "--json").stdout)
    assert series["plan"] == {"loss": 0.1, "nights": 3, "sessions": 1}


def test_a_history_shows_what_it_refutes(qnnfarm: Run, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).normal(0, 0.015, 40)
    levels = np.array([50.0] * 20 + [44.0] * 3 + [50.0] * 17)
    write(tmp_path, (levels * np.exp(noise)).tolist())
    shown = qnnfarm("history", "decode", "--nights", "40").stdout
    assert "no change" in shown
    assert "from here on, found 2026-01-22, refuted 2026-01-27: back by itself" in shown
    (series,) = json.loads(qnnfarm("history", "decode", "--json").stdout)
    assert series["changes"] == []
    (refuted,) = series["refuted"]
    assert refuted["began"].startswith("2026-01-21")


def test_an_alert_is_settled_by_a_command(qnnfarm: Run, nights: None) -> None:
    (alert,) = json.loads(qnnfarm("alerts", "ls", "--json").stdout)
    assert (alert["state"], alert["metric"]) == ("open", "decode_tokens_per_s")
    done = qnnfarm("alerts", "expect", alert["id"][:6], "--note", "the new Genie")
    assert done.returncode == 0, done.stderr
    assert "0 alerts" in qnnfarm("alerts", "ls").stdout
    assert "the new Genie" in qnnfarm("alerts", "ls", "--all").stdout
    assert qnnfarm("alerts", "fix", "zz").returncode == NO_ANSWER


def test_a_missing_database_is_not_created(qnnfarm: Run, tmp_path: Path) -> None:
    assert qnnfarm("alerts", "ls").returncode == NO_ANSWER
    assert qnnfarm("history", "decode").returncode == NO_ANSWER
    assert list(tmp_path.iterdir()) == []
