import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from device_scripts import genie_perplexity

if TYPE_CHECKING:
    from device_scripts import genie_api
else:
    import genie_api

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
  *garbage) echo '{garbage' >/proc/self/fd/$fd ;;
  *infinite) echo '{"perplexity": Infinity}' >/proc/self/fd/$fd ;;
esac
"""


@pytest.mark.parametrize(
    ("window", "message"),
    [
        ("hangs", "no result after 0.3 s, 3 times"),
        ("aborts", "died of signal 6"),
        ("fails", "failed (its error is above)"),
        ("garbage", "genie-perplexity: error: "),
        ("infinite", "perplexity of"),
    ],
)
def test_a_failure_leaves_no_result(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    window: str,
    message: str,
) -> None:
    child = tmp_path / "python"
    child.write_text(CHILD)
    child.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(child))
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text('{"dialog": {"context": {"size": 192}}}')
    Path(window).write_text("text")
    timeout_s = "0.3" if window == "hangs" else "200"
    words = ["-c", "config.json", "--ar", "32", "--out", "out", "--timeout", timeout_s]
    assert genie_perplexity.main([*words, "--retries", "2", "--window-files", window]) == 1
    assert message in capfd.readouterr().err.splitlines()[-1]
    assert not Path("out").exists()


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
