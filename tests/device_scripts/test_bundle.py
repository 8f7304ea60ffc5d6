"""The runners on a real Genie bundle, with the real library."""

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.device_scripts.conftest import Runner, last_query, shortened

TEXT = "".join(chr(0x100 + token) for token in range(2, 62))
ASKED, MORE = TEXT[:5], TEXT[5:7]
WINDOW = (4 * TEXT)[:197]
"""As many tokens as a window of the context of 192 takes, and a few more."""
T2T = ("genie_t2t_run.py", "-c", "genie_config.json")
PERPLEXITY = ("genie_perplexity.py", "-c", "genie_config.json", "--ar", "32", "--out", "r.json")


@pytest.fixture
def bundle(small_bundle: Path, tmp_path: Path) -> Path:
    """One of random weights with answers of four tokens, and a letter for each token."""
    return shortened(small_bundle, tmp_path, 4)


def answer(stdout: str) -> str:
    return stdout[stdout.index("\n[BEGIN]: ") + 10 : stdout.rindex("[END]")]


def test_prompt_prompt_file_and_tokens(runner: Runner, bundle: Path, tmp_path: Path) -> None:
    """A query by tokens generates what the same prompt does; Genie puts bos before both."""
    done = runner.run(*T2T, "-p", TEXT, "--profile", "p.json", cwd=bundle)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Using libGenie.so version 1.")
    assert f"[PROMPT]: {TEXT}\n\n[BEGIN]: " in done.stdout
    text = answer(done.stdout)
    assert text
    (tmp_path / "prompt").write_text(TEXT)
    again = runner.run(*T2T, "--prompt_file", tmp_path / "prompt", cwd=bundle)
    assert answer(again.stdout) == text
    ids = [ord(letter) - 0x100 for letter in TEXT]
    (tmp_path / "tokens").write_text(" ".join(map(str, ids)))
    by_tokens = runner.run(*T2T, "-tok", tmp_path / "tokens", cwd=bundle)
    assert [ord(letter) - 0x100 for letter in text] == [*map(int, answer(by_tokens.stdout).split())]
    query = last_query(bundle / "p.json")
    assert query["num-prompt-tokens"]["value"] == len(ids) + 1
    assert query["num-generated-tokens"]["value"] == 4
    assert query["time-to-first-token"]["unit"] == "us"


def test_a_prompt_longer_than_the_context_fails_in_one_line(runner: Runner, bundle: Path) -> None:
    done = runner.run(*T2T, "-p", TEXT * 30, cwd=bundle)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "genie-t2t-run: error: GenieDialog_query: the prompt exceeds the context and failed: "
        "GENIE_STATUS_WARNING_CONTEXT_EXCEEDED (4)"
    )


def test_rewind_and_a_prompt_that_is_no_utf_8(runner: Runner, bundle: Path, tmp_path: Path) -> None:
    done = runner.run(*T2T, "-p", ASKED, "-w", ASKED[:3], cwd=bundle)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[BEGIN]: ") == 2
    (tmp_path / "prompt").write_bytes(b"\xff\xfe")
    done = runner.run(*T2T, "--prompt_file", tmp_path / "prompt", cwd=bundle)
    assert done.returncode == 1
    assert "GenieDialog_query failed: GENIE_STATUS_ERROR_" in done.stderr


def test_a_damaged_binary_is_an_error_not_a_hang(runner: Runner, bundle: Path) -> None:
    binary = min(bundle.glob("*.bin"))
    data = binary.read_bytes()
    binary.unlink()
    binary.write_bytes(data[: len(data) // 2])
    done = runner.run(*T2T, "-p", "x", cwd=bundle)
    assert done.returncode == 1
    assert "genie-t2t-run: error: GenieDialog_create failed: GENIE_STATUS_ERROR_" in done.stderr


def test_a_signal_closes_the_dialog_and_is_told(runner: Runner, small_bundle: Path) -> None:
    """Without that the process aborts when it ends."""
    process = subprocess.Popen(
        runner.command(T2T[0], [*T2T[1:], "-p", ASKED]),
        cwd=small_bundle,
        env=runner.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    said = b""
    while len(said.partition(b"[BEGIN]: ")[2]) < 2:
        said += process.stdout.read(1)
    process.terminate()
    _, error = process.communicate(timeout=200)
    assert process.returncode == 128 + signal.SIGTERM
    assert error.splitlines()[-1] == b"genie-t2t-run: error: ended by SIGTERM"


def test_an_app_script(runner: Runner, bundle: Path) -> None:
    (bundle / "tokens").write_text("43 80 263")
    (bundle / "accuracy.json").write_text(json.dumps({"dataset": "window", "type": "perplexity"}))
    (bundle / "window").write_text(WINDOW)
    (bundle / "stop.json").write_text('{"stop-sequence": ["xyzzy"]}')
    (bundle / "script").write_text(
        f"""# everything once
version
profile create p
log create l error
dialog config create c genie_config.json
dialog config bind profile c p
dialog config bind log c l
dialog create d c
dialog setPerformance d GENIE_PERFORMANCE_BURST
loop 2
  dialog reset d
  dialog query d "{ASKED}" answer
endloop
dialog save d saved
dialog query d "{MORE}" after
dialog reset d
dialog query d "{MORE}" fresh
dialog reset d
dialog restore d saved
dialog query d "{MORE}" restored
dialog setStopSequence d stop.json
dialog setMaxNumTokens d 6
dialog reset d
dialog tokenQuery d tokens ids
profile save p p.json
dialog free d
dialog create fresh c
accuracy config create ac accuracy.json
accuracy create a ac fresh
ls
sleep 1
exit
dialog query nobody this-is-checked-but-not-run
"""
    )
    done = runner.run("genie_app.py", "-s", "script", cwd=bundle)
    assert done.returncode == 0, done.stderr
    assert (bundle / "answer").read_bytes()
    after = (bundle / "after").read_bytes()
    assert (bundle / "restored").read_bytes() == after != (bundle / "fresh").read_bytes()
    assert len((bundle / "ids").read_text().split()) == 6
    events = json.loads((bundle / "p.json").read_text())["components"][0]["events"]
    assert sum(event["type"] == "GenieDialog_query" for event in events) >= 2
    assert done.stdout.endswith("accuracy config ac\naccuracy a\n")


@pytest.mark.genie_configuration("node text-generator")
def test_an_app_script_of_nodes_and_pipelines(runner: Runner, bundle: Path) -> None:
    """Measured on Genie 1.21: a node says what the dialog of its configuration says."""
    dialog = json.loads((bundle / "genie_config.json").read_text())["dialog"]
    (bundle / "node.json").write_text(json.dumps({"text-generator": dialog}))
    (bundle / "pipeline.json").write_text("{}")
    (bundle / "saved").mkdir()
    (bundle / "script").write_text(
        f"""dialog config create c genie_config.json
dialog create d c
dialog setPriority d primary GENIE_DIALOG_PRIORITY_HIGH
dialog query d "{ASKED}" answer
dialog free d
node config create nc node.json
node create n nc
pipeline config create pc pipeline.json
pipeline create p pc
pipeline addNode p n
node setText n "{ASKED}"
pipeline execute p said
pipeline save p saved
node setText n "{MORE}"
pipeline execute p after
pipeline reset p
node setText n "{MORE}"
pipeline execute p fresh
pipeline reset p
pipeline restore p saved
node setText n "{MORE}"
pipeline execute p restored
"""
    )
    done = runner.run("genie_app.py", "-s", "script", cwd=bundle)
    assert done.returncode == 0, done.stderr
    assert (bundle / "said").read_bytes() == (bundle / "answer").read_bytes() != b""
    after = (bundle / "after").read_bytes()
    assert (bundle / "restored").read_bytes() == after != (bundle / "fresh").read_bytes()


def test_an_app_script_of_embeddings(runner: Runner, encoder_bundle: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "encoder"
    shutil.copytree(encoder_bundle, bundle)
    (bundle / "text").write_text(TEXT)
    (bundle / "script").write_text(
        f"""profile create p
embedding config create c genie_config.json
embedding config bind profile c p
embedding create e c
embedding setPerformance e GENIE_PERFORMANCE_BURST
embedding generate e "{TEXT}" vector.raw
embedding generate e text again.raw
profile save p p.json
"""
    )
    done = runner.run("genie_app.py", "-s", "script", "--trace", "trace.json", cwd=bundle)
    assert done.returncode == 0, done.stderr
    assert "[EMBEDDING]: 1x144" in done.stdout
    assert (bundle / "vector.raw").read_bytes() == (bundle / "again.raw").read_bytes()
    assert (bundle / "vector.raw").stat().st_size == 4 * 144
    names = [
        event["name"] for event in json.loads((bundle / "trace.json").read_text())["traceEvents"]
    ]
    assert names.count("GenieEmbedding_generate") == 2


@pytest.mark.genie_configuration("standalone engine")
def test_the_engine_that_drafts_is_switched(runner: Runner, bundle: Path) -> None:
    """The documented flag: a dialog with two engines gets another draft, and says the same."""
    document = json.loads((bundle / "genie_config.json").read_text())
    dialog = document["dialog"]
    draft = {"role": "draft", **dialog["engine"]}
    alone = {"version": 1, "context": dialog["context"], "engine": draft}
    (bundle / "engine.json").write_text(json.dumps({"standalone-engine": alone}))
    dialog |= {
        "type": "spd",
        "spd": {"version": 1, "draft-len": 3},
        "engine": [{"role": "target", **dialog["engine"]}, draft],
    }
    (bundle / "spd.json").write_text(json.dumps(document))
    asked = ("genie_t2t_run.py", "-c", "spd.json", "-p", ASKED)
    plain = runner.run(*asked, cwd=bundle)
    switch = ("--allow_engine_switch", "draft,engine.json")
    switched = runner.run(*asked, *switch, cwd=bundle)
    assert plain.returncode == switched.returncode == 0, plain.stderr + switched.stderr
    assert switched.stdout.partition("[BEGIN]")[2] == plain.stdout.partition("[BEGIN]")[2] != ""
    wrong = runner.run(*asked, "--allow_engine_switch", "other,engine.json", cwd=bundle)
    assert wrong.returncode == 1
    assert "GenieDialog_bindEngine failed" in wrong.stderr


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        ("dialog reset nobody", 2, "script: line 2: there is no dialog nobody"),
        (
            "dialog config create c genie_config.json",
            2,
            "line 2: the dialog config c is there already",
        ),
        (
            "dialog config create b script",
            1,
            "line 2: GenieDialogConfig_createFromJson failed: GENIE_STATUS_ERROR_JSON_FORMAT (-7)",
        ),
        ("log create l loud", 2, "line 2: unknown level loud"),
        ("pipeline addNode p n", 2, "line 2: there is no pipeline p"),
        ("sleep forever", 2, "line 2: not a number of milliseconds"),
    ],
)
def test_an_app_script_that_fails_names_its_line(
    runner: Runner, bundle: Path, line: str, status: int, message: str
) -> None:
    (bundle / "script").write_text(f"dialog config create c genie_config.json\n{line}\n")
    done = runner.run("genie_app.py", "-s", "script", cwd=bundle)
    assert done.returncode == status
    assert message in done.stderr.splitlines()[-1]


def test_perplexity_by_windows(runner: Runner, bundle: Path) -> None:
    for name, text in (("w0", WINDOW), ("w1", WINDOW[5:]), ("w2", 2 * WINDOW), ("w3", TEXT)):
        (bundle / name).write_text(text)
    base = (*PERPLEXITY, "--window-files")
    done = runner.run(*base, "w0", "w1", cwd=bundle)
    assert done.returncode == 0, done.stderr
    result = json.loads((bundle / "r.json").read_text())
    first, second = (window["perplexity"] for window in result["windows"])
    assert first != second
    assert result["perplexity"] == pytest.approx((first * second) ** (1 / 2))
    assert (result["n_windows"], result["n_tokens"], result["retries"]) == (2, 2 * (192 - 32), 0)
    assert result["positions"] == "first_cl_minus_ar"
    assert result["genie_version"].startswith("1.")
    for window in ("w2", "w3"):
        done = runner.run(*base, window, cwd=bundle)
        assert done.returncode == 1
        assert f"{window} has " in done.stderr


def _evaluates(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"--answer-fd" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def test_a_child_that_stands_still_is_killed_and_started_again(
    runner: Runner, bundle: Path
) -> None:
    (bundle / "w0").write_text(WINDOW)
    script, *arguments = (*PERPLEXITY, "--window-files", "w0")
    began = time.monotonic()
    assert runner.run(script, *arguments, cwd=bundle).returncode == 0
    timeout_s = max(3, math.ceil(5 * (time.monotonic() - began)))  # as the machine is slow
    process = subprocess.Popen(
        runner.command(script, ["--timeout", str(timeout_s), *arguments]),
        cwd=bundle,
        env=runner.environment,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    parent = psutil.Process(process.pid)
    end = time.monotonic() + 200
    # Stopped before it is a program of its own, it would hold up its parent, too.
    while not (found := [child.pid for child in parent.children() if _evaluates(child.pid)]):
        assert time.monotonic() < end
        time.sleep(0.01)
    os.kill(found[0], signal.SIGSTOP)
    assert process.wait(timeout=250) == 0
    assert json.loads((bundle / "r.json").read_text())["retries"] == 1
    shutil.rmtree(bundle)
