"""What a runner printed or wrote is outside text: parsed, or refused with a typed error."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.deploy.store import DISK_FULL
from harness.devices.base import CommandResult
from harness.devices.device import Device
from harness.devices.local import LocalTransport
from harness.errors import DeviceFullError, RunnerError, RuntimeOutputError
from harness.runtimes.base import GenerationResult
from harness.runtimes.deployed import RunFolder, parse_run_line
from harness.runtimes.genie.output import find_early_end, generated_text, parse_clock, parse_profile
from harness.workloads.base import check_length

if TYPE_CHECKING:
    from harness.deploy.deployment import Deployment

LINE = (
    "qnnfarm-run exit=137 signal=9 timed_out=1 peak_rss_kb=2048 peak_anon_kb=512 "
    "peak_file_kb=1536 elapsed_ms=1500 reason=timeout leftover=0"
)


def profile(**figures: object) -> str:
    query = {
        "type": "GenieDialog_query",
        "num-prompt-tokens": {"value": 13, "unit": ""},
        "prompt-processing-rate": {"value": 25.5, "unit": "toks/sec"},
        "time-to-first-token": {"value": 507221, "unit": "us"},
        "num-generated-tokens": {"value": 8, "unit": ""},
        "token-generation-rate": {"value": 2.5, "unit": "toks/sec"},
    } | figures
    create = {"type": "GenieDialog_create", "init-time": {"value": 122, "unit": "ms"}}
    return json.dumps({"components": [{"name": "dialog0", "events": [create, query]}]})


def test_a_run_line_is_read_from_the_end_of_the_output() -> None:
    outcome = parse_run_line(f"chatter\n{LINE}\n")
    assert outcome is not None
    assert (outcome.exit_status, outcome.signal, outcome.timed_out) == (137, 9, True)
    assert outcome.peak_rss_bytes == 2048 * 1024
    assert (outcome.peak_anonymous_bytes, outcome.peak_file_bytes) == (512 * 1024, 1536 * 1024)
    assert outcome.elapsed_s == 1.5
    assert not outcome.succeeded
    unknown = parse_run_line(LINE.replace("peak_rss_kb=2048", "peak_rss_kb=0"))
    assert unknown is not None
    assert unknown.peak_rss_bytes is None
    assert unknown.memory == {"peak_anonymous_bytes": 2.0**19, "peak_file_bytes": 1.5 * 2**20}


@pytest.mark.parametrize(
    ("status", "pieces", "generated", "reason"),
    [
        (0, 8, 8.0, None),
        (0, 8, 0.0, None),
        (0, 3, 4.0, "an end-of-sequence token ended it"),
        (0, 0, 0.0, "an end-of-sequence token ended it"),
        (4, 3, 3.0, "the context is full"),
        (0, 1, 1.0, "nothing"),
    ],
)
def test_an_answer_that_nothing_ended_is_wrong(
    status: int, pieces: int, generated: float, reason: str | None
) -> None:
    text = json.dumps({"format": 1, "init_s": 0.1, "status": status, "pieces": [0.5] * pieces})
    end = find_early_end(generated, 8, parse_clock(text, "serial"))
    checked = check_length(GenerationResult("text", {}, early_end=end))
    if reason is None:
        assert end is None
        return
    assert end is not None
    assert (end.tokens, end.asked, end.reason or "nothing") == (pieces, 8, reason)
    assert checked.outcome == ("failed" if reason == "nothing" else "none")


def test_a_clock_stands_in_for_a_profile_without_figures() -> None:
    """A prefill ends with the first token."""
    clock = parse_clock('{"format": 1, "init_s": 2, "status": 4, "pieces": [0.5, 1, 1.5]}', "d")
    assert clock.metrics(prompt_tokens=8) == {
        "init_s": 2.0, "prompt_tokens": 8.0, "generated_tokens": 3.0, "ttft_s": 0.5,
        "prefill_tokens_per_s": 16.0, "decode_tokens_per_s": 2.0,
    }  # fmt: skip


@pytest.mark.parametrize("output", ["", "\n", f"{LINE}\nmore", LINE.replace("exit", "exec")])
def test_without_the_line_there_is_no_outcome(output: str) -> None:
    assert parse_run_line(output) is None


def test_signs_of_life_are_told_as_they_come() -> None:
    told: list[tuple[float, str]] = []
    lines = "noise\nqnnfarm-running elapsed_s=10 \nqnnfarm-running elapsed_s=20 window 2/8\n"

    def stream(_script: object, on_output: Callable[[bytes], None], **_others: float) -> object:
        for byte in f"{lines}{LINE}\n".encode():
            on_output(bytes([byte]))
        return CommandResult(0, f"{lines}{LINE}\n", "")

    def shell(_command: object, **_others: object) -> CommandResult:
        return CommandResult(0, "", "")

    device = cast("Device", SimpleNamespace(serial="d", stream=stream, shell=shell))
    deployment = cast("Deployment", SimpleNamespace(run_dir="/run", scripts_dir="/scripts"))
    folder = RunFolder(device, deployment, lambda seconds, words: told.append((seconds, words)))
    with pytest.raises(RunnerError, match=r"had not ended after 2 s.*--timeout"):
        folder.run(["x"], name="x", timeout_s=1)
    assert told == [(10.0, ""), (20.0, "window 2/8")]


def test_the_unit_in_the_profile_decides() -> None:
    metrics = parse_profile(profile(), "serial")
    assert metrics == {
        "init_s": pytest.approx(0.122),
        "prompt_tokens": 13,
        "prefill_tokens_per_s": 25.5,
        "ttft_s": pytest.approx(0.507221),
        "generated_tokens": 8,
        "decode_tokens_per_s": 2.5,
    }
    text = profile(**{"token-acceptance-rate": {"value": 1.5, "unit": "toks/iteration"}})
    assert parse_profile(text, "serial")["token_acceptance_rate"] == 1.5
    single = parse_profile(profile(**{"num-generated-tokens": {"value": 1, "unit": ""}}), "s")
    assert "decode_tokens_per_s" not in single
    with pytest.raises(RuntimeOutputError, match="ttft_s"):
        parse_profile(profile().replace("time-to-first-token", "other"), "serial")


@pytest.mark.parametrize(
    "figure",
    [
        {"time-to-first-token": 507221},
        {"time-to-first-token": {"value": 5, "unit": "fortnights"}},
        {"time-to-first-token": {"value": "5", "unit": "us"}},
        {"time-to-first-token": {"value": float("nan"), "unit": "us"}},
        {"time-to-first-token": {"unit": "us"}},
    ],
)
def test_a_figure_that_cannot_be_trusted_is_refused(figure: dict[str, object]) -> None:
    with pytest.raises(RuntimeOutputError):
        parse_profile(profile(**figure), "serial")


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["events", "x"]), inner),
    max_leaves=20,
)


@given(st.text() | st.builds(json.dumps, st.fixed_dictionaries({"components": json_values})))
def test_garbage_is_a_typed_error(text: str) -> None:
    with contextlib.suppress(RuntimeOutputError):
        parse_profile(text, "serial")


@given(st.text(alphabet=st.characters(exclude_characters="\r")))
def test_generated_text_survives_whatever_the_model_says(text: str) -> None:
    output = f"Using libGenie.so version 1.21.0\n\n[PROMPT]: hello\n\n[BEGIN]: {text}[END]\n\n"
    if "\n[BEGIN]: " not in text:
        assert generated_text(output, "serial") == text


@pytest.mark.parametrize("output", ["", "[PROMPT]: x", "\n[BEGIN]: cut off", "[END]\n[BEGIN]: "])
def test_output_without_marks_is_a_typed_error(output: str) -> None:
    with pytest.raises(RuntimeOutputError):
        generated_text(output, "serial")


def test_file_that_is_larger_than_expected_is_the_devices_fault(tmp_path: Path) -> None:
    (tmp_path / "logits.raw").write_bytes(bytes(3 << 20))
    deployment = cast("Deployment", SimpleNamespace(run_dir=str(tmp_path)))
    folder = RunFolder(Device(LocalTransport()), deployment)
    assert len(folder.pull("logits.raw", 3 << 20)) == 3 << 20
    with pytest.raises(RuntimeOutputError, match=r"more than 1000 bytes in logits\.raw"):
        folder.pull("logits.raw", 1000)


def test_a_run_that_finds_no_space_says_that_the_device_is_full() -> None:
    result = CommandResult(125, "", f"error: cannot write to /runs/r: {DISK_FULL}\n")
    device = SimpleNamespace(serial="S1")
    device.stream = lambda *_words, **_options: result
    deployment = SimpleNamespace(run_dir="/runs/r", scripts_dir="/scripts")
    folder = RunFolder(cast("Device", device), cast("Deployment", deployment))
    with pytest.raises(DeviceFullError, match="device S1 is full at /runs/r"):
        folder.run(["true"], name="true", timeout_s=1)
