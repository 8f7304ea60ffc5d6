import json
import math
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from device_scripts import genie_perplexity

if TYPE_CHECKING:
    from device_scripts import genie_api
else:
    import genie_api

Measure = Callable[..., tuple[int, Path, str]]

CHILD = """#!/bin/sh
# stands where the interpreter is: what the parent sees of a child that hangs, dies or answers
while [ $# -gt 0 ]; do
  case $1 in --answer-fd) fd=$2 ;; --window-files) window=$2 ;; esac
  shift
done
echo "noise of the library"
case $window in
  *hangs) exec sleep 600 ;;
  *aborts) kill -ABRT $$ ;;
  *fails) exit 1 ;;
  *garbage) echo '{garbage' >/proc/self/fd/$fd; exit 0 ;;
  *infinite) echo '{"perplexity": Infinity}' >/proc/self/fd/$fd; exit 0 ;;
esac
rest='"tokens": 191, "tokens_sha256": "00", "version": "1.2.3"'
echo "{\\"perplexity\\": $(cat "$window"), $rest}" >/proc/self/fd/$fd
"""


@pytest.fixture
def measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Measure:
    """Runs the program over windows named by what their evaluation does."""
    child = tmp_path / "python"
    child.write_text(CHILD)
    child.chmod(child.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(child))
    config = tmp_path / "config.json"
    config.write_text('{"dialog": {"context": {"size": 192}}}')

    def run(timeout_s: float = 200, **windows: str) -> tuple[int, Path, str]:
        files = []
        for name, perplexity in windows.items():
            files.append(tmp_path / name.replace("_", "-"))
            files[-1].write_text(perplexity)
        arguments = ["-c", str(config), "--ar", "32", "--out", str(tmp_path / "out")]
        arguments += ["--timeout", str(timeout_s), "--retries", "2"]
        arguments += ["--window-files", *map(str, files)]
        status = genie_perplexity.main(arguments)
        return status, tmp_path / "out", capfd.readouterr().err

    return run


def test_windows_are_combined_by_their_log_likelihood(measure: Measure) -> None:
    status, out, _ = measure(first="4.0", second="9.0")
    result = json.loads(out.read_text())
    assert status == 0
    assert math.isclose(result["perplexity"], 6.0)
    assert result["positions"] == "first_cl_minus_ar"
    assert (result["n_windows"], result["n_tokens"], result["retries"]) == (2, 2 * (192 - 32), 0)
    assert [window["perplexity"] for window in result["windows"]] == [4.0, 9.0]
    assert result["genie_version"] == "1.2.3"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hangs", "no result after 0.3 s, 3 times"),
        ("aborts", "died of signal 6"),
        ("fails", "failed (its error is above)"),
        ("garbage", "genie-perplexity: error: "),
        ("infinite", "perplexity of"),
    ],
)
def test_a_failure_leaves_no_result(measure: Measure, name: str, message: str) -> None:
    status, out, error = measure(0.3 if name == "hangs" else 200, **{name: "1.0"})
    assert status == 1
    assert message in error.splitlines()[-1]
    assert not out.exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"dialog": 1}',
        '{"dialog":{"context":{"size":true}}}',
        '{"dialog":{"context":{"size":1}}}',
        "[" * 99999,
    ],
)
def test_a_configuration_without_a_context_length(text: str) -> None:
    with pytest.raises(genie_api.FatalError):
        genie_perplexity.context_length(text.encode())


@pytest.mark.parametrize(
    ("dialog", "role", "engine"),
    [
        ({}, "target", None),
        ({"type": "basic", "engine": {}}, None, None),
        ({"type": "lade", "engine": {}}, "target", {"convert-to-basic": True}),
        (
            {"type": "spd", "engine": [{"role": "target"}, {"role": "draft"}]},
            None,
            {"convert-to-basic": True, "role": "target"},
        ),
        (
            {"type": "spd", "engine": [{"role": "target"}, {"role": "draft"}]},
            "draft",
            {"convert-to-basic": True, "role": "draft"},
        ),
    ],
)
def test_a_dialog_that_speculates_is_scored_as_a_basic_one(
    dialog: dict[str, object], role: str | None, engine: dict[str, object] | None
) -> None:
    config = json.dumps({"dialog": dialog}).encode()
    asked = json.loads(genie_perplexity.accuracy_json(config, "w.txt", role))
    assert asked == {"dataset": "w.txt", "type": "perplexity"} | (
        {} if engine is None else {"engine": engine}
    )


def test_a_dialog_without_a_draft_model_has_none_to_score() -> None:
    with pytest.raises(genie_api.FatalError, match="type lade has no draft model"):
        genie_perplexity.accuracy_json(b'{"dialog": {"type": "lade"}}', "w.txt", "draft")
