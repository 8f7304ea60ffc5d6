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
import tokenizers

from tests.device_scripts.conftest import Runner, last_query, shortened

TEXT = (
    "In the beginning God created the heaven and the earth. And the earth was without form, and "
    "void; and darkness was upon the face of the deep. And the Spirit of God moved upon the face "
    "of the waters. And God said, Let there be light: and there was light. "
)


ASKED = "In the beginning God created"
T2T = ("genie_t2t_run.py", "-c", "genie_config.json")
PERPLEXITY = ("genie_perplexity.py", "-c", "genie_config.json", "--ar", "32", "--out", "r.json")


@pytest.fixture
def short_bundle(bundle: Path, tmp_path: Path) -> Path:
    """The bundle with answers of four tokens."""
    return shortened(bundle, tmp_path, 4)


@pytest.fixture
def random_bundle(small_bundle: Path, tmp_path: Path) -> Path:
    """One of random weights with answers of four tokens, where nobody looks at what is said."""
    return shortened(small_bundle, tmp_path, 4)


def answer(stdout: str) -> str:
    return stdout[stdout.index("\n[BEGIN]: ") + 10 : stdout.rindex("[END]")]


def test_prompt_prompt_file_and_tokens(runner: Runner, short_bundle: Path, tmp_path: Path) -> None:
    """A query by tokens generates what the same prompt does; Genie puts bos before both."""
    done = runner.run(*T2T, "-p", TEXT, "--profile", "p.json", cwd=short_bundle)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Using libGenie.so version 1.")
    assert f"[PROMPT]: {TEXT}\n\n[BEGIN]: " in done.stdout
    text = answer(done.stdout)
    assert text
    (tmp_path / "prompt").write_text(TEXT)
    again = runner.run(*T2T, "--prompt_file", tmp_path / "prompt", cwd=short_bundle)
    assert answer(again.stdout) == text
    tokenizer = tokenizers.Tokenizer.from_file(str(short_bundle / "tokenizer.json"))
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    (tmp_path / "tokens").write_text(" ".join(map(str, ids)))
    by_tokens = runner.run(*T2T, "-tok", tmp_path / "tokens", cwd=short_bundle)
    assert tokenizer.decode([int(i) for i in answer(by_tokens.stdout).split()]) == text
    query = last_query(short_bundle / "p.json")
    assert query["num-prompt-tokens"]["value"] == len(ids) + 1
    assert query["num-generated-tokens"]["value"] == 4
    assert query["time-to-first-token"]["unit"] == "us"


def test_a_prompt_longer_than_the_context_fails_in_one_line(
    runner: Runner, random_bundle: Path
) -> None:
    done = runner.run(*T2T, "-p", TEXT * 30, cwd=random_bundle)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "genie-t2t-run: error: GenieDialog_query: the prompt exceeds the context and failed: "
        "GENIE_STATUS_WARNING_CONTEXT_EXCEEDED (4)"
    )


def test_rewind_and_a_prompt_that_is_no_utf_8(
    runner: Runner, short_bundle: Path, tmp_path: Path
) -> None:
    done = runner.run(*T2T, "-p", "In the beginning", "-w", "In the end", cwd=short_bundle)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[BEGIN]: ") == 2
    (tmp_path / "prompt").write_bytes(b"\xff\xfe")
    done = runner.run(*T2T, "--prompt_file", tmp_path / "prompt", cwd=short_bundle)
    assert done.returncode == 1
    assert "GenieDialog_query failed: GENIE_STATUS_ERROR_" in done.stderr


def test_a_damaged_binary_is_an_error_not_a_hang(runner: Runner, random_bundle: Path) -> None:
    binary = min(random_bundle.glob("*.bin"))
    data = binary.read_bytes()
    binary.unlink()
    binary.write_bytes(data[: len(data) // 2])
    done = runner.run(*T2T, "-p", "x", cwd=random_bundle)
    assert done.returncode == 1
    assert "genie-t2t-run: error: GenieDialog_create failed: GENIE_STATUS_ERROR_" in done.stderr


def test_a_reader_that_goes_away_ends_the_run(runner: Runner, random_bundle: Path) -> None:
    command = runner.command(T2T[0], [*T2T[1:], "-p", TEXT])
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        command,
        cwd=random_bundle,
        env=runner.environment,
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    os.close(writer)
    assert done.returncode != 0


def test_a_signal_closes_the_dialog_and_is_told(runner: Runner, bundle: Path) -> None:
    """Without that the process aborts when it ends."""
    process = subprocess.Popen(
        runner.command(T2T[0], [*T2T[1:], "-p", "In the beginning"]),
        cwd=bundle,
        env=runner.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    said = b""
    while len(said.partition(b"[BEGIN]: ")[2]) < 2:
        said += process.stdout.read(1)
    process.terminate()
    _, error = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    assert error.splitlines()[-1] == b"genie-t2t-run: error: ended by SIGTERM"


def test_an_app_script(runner: Runner, short_bundle: Path) -> None:
    (short_bundle / "tokens").write_text("43 80 263")
    (short_bundle / "accuracy.json").write_text(
        json.dumps({"dataset": "window", "type": "perplexity"})
    )
    (short_bundle / "window").write_text(TEXT * 4)
    (short_bundle / "stop.json").write_text('{"stop-sequence": ["xyzzy"]}')
    (short_bundle / "script").write_text(
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
dialog query d "And" after
dialog reset d
dialog restore d saved
dialog query d "And" restored
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
    done = runner.run("genie_app.py", "-s", "script", cwd=short_bundle)
    assert done.returncode == 0, done.stderr
    assert (short_bundle / "answer").read_bytes()
    after = (short_bundle / "after").read_bytes()
    assert after
    assert (short_bundle / "restored").read_bytes() == after
    assert len((short_bundle / "ids").read_text().split()) == 6
    events = json.loads((short_bundle / "p.json").read_text())["components"][0]["events"]
    assert sum(event["type"] == "GenieDialog_query" for event in events) >= 2
    assert done.stdout.endswith("accuracy config ac\naccuracy a\n")


def test_an_app_script_of_nodes_and_pipelines(runner: Runner, short_bundle: Path) -> None:
    """Measured on Genie 1.21: a node says what the dialog of its configuration says."""
    dialog = json.loads((short_bundle / "genie_config.json").read_text())["dialog"]
    (short_bundle / "node.json").write_text(json.dumps({"text-generator": dialog}))
    (short_bundle / "pipeline.json").write_text("{}")
    (short_bundle / "saved").mkdir()
    (short_bundle / "script").write_text(
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
node setText n "And"
pipeline execute p after
pipeline reset p
pipeline restore p saved
node setText n "And"
pipeline execute p restored
"""
    )
    done = runner.run("genie_app.py", "-s", "script", cwd=short_bundle)
    assert done.returncode == 0, done.stderr
    assert (short_bundle / "said").read_bytes() == (short_bundle / "answer").read_bytes() != b""
    assert (short_bundle / "restored").read_bytes() == (short_bundle / "after").read_bytes() != b""


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
def test_the_engine_that_drafts_is_switched(runner: Runner, short_bundle: Path) -> None:
    """The documented flag: a dialog with two engines gets another draft, and says the same."""
    document = json.loads((short_bundle / "genie_config.json").read_text())
    dialog = document["dialog"]
    draft = {"role": "draft", **dialog["engine"]}
    alone = {"version": 1, "context": dialog["context"], "engine": draft}
    (short_bundle / "engine.json").write_text(json.dumps({"standalone-engine": alone}))
    dialog |= {
        "type": "spd",
        "spd": {"version": 1, "draft-len": 3},
        "engine": [{"role": "target", **dialog["engine"]}, draft],
    }
    (short_bundle / "spd.json").write_text(json.dumps(document))
    asked = ("genie_t2t_run.py", "-c", "spd.json", "-p", ASKED)
    plain = runner.run(*asked, cwd=short_bundle)
    switch = ("--allow_engine_switch", "draft,engine.json")
    switched = runner.run(*asked, *switch, cwd=short_bundle)
    assert plain.returncode == switched.returncode == 0, plain.stderr + switched.stderr
    assert switched.stdout.partition("[BEGIN]")[2] == plain.stdout.partition("[BEGIN]")[2] != ""
    wrong = runner.run(*asked, "--allow_engine_switch", "other,engine.json", cwd=short_bundle)
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
    runner: Runner, random_bundle: Path, line: str, status: int, message: str
) -> None:
    (random_bundle / "script").write_text(f"dialog config create c genie_config.json\n{line}\n")
    done = runner.run("genie_app.py", "-s", "script", cwd=random_bundle)
    assert done.returncode == status
    assert message in done.stderr.splitlines()[-1]


def window_text(bundle: Path) -> str:
    tokenizer = tokenizers.Tokenizer.from_file(str(bundle / "tokenizer.json"))
    length = json.loads((bundle / "genie_config.json").read_text())["dialog"]["context"]["size"]
    text: str = TEXT * (int(length) // 20)
    end = tokenizer.encode(text, add_special_tokens=False).offsets[length + 5][1]
    return text[: int(end)]


def test_perplexity_by_windows(runner: Runner, short_bundle: Path) -> None:
    text = window_text(short_bundle)
    (short_bundle / "w0").write_text(text)
    (short_bundle / "w1").write_text(text[10:])
    (short_bundle / "w2").write_text(text + text)
    base = (*PERPLEXITY, "--window-files")
    done = runner.run(*base, "w0", "w1", cwd=short_bundle)
    assert done.returncode == 0, done.stderr
    result = json.loads((short_bundle / "r.json").read_text())
    first, second = (window["perplexity"] for window in result["windows"])
    assert first != second
    assert result["perplexity"] == pytest.approx((first * second) ** (1 / 2))
    (short_bundle / "w3").write_text(TEXT)
    for window in ("w2", "w3"):
        done = runner.run(*base, window, cwd=short_bundle)
        assert done.returncode == 1
        assert f"{window} has " in done.stderr


def _evaluates(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"--answer-fd" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def test_a_child_that_stands_still_is_killed_and_started_again(
    runner: Runner, random_bundle: Path
) -> None:
    (random_bundle / "w0").write_text(window_text(random_bundle))
    script, *arguments = (*PERPLEXITY, "--window-files", "w0")
    began = time.monotonic()
    assert runner.run(script, *arguments, cwd=random_bundle).returncode == 0
    timeout_s = max(6, math.ceil(8 * (time.monotonic() - began)))  # as the machine is slow
    process = subprocess.Popen(
        runner.command(script, ["--timeout", str(timeout_s), *arguments]),
        cwd=random_bundle,
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
    assert json.loads((random_bundle / "r.json").read_text())["retries"] == 1
    shutil.rmtree(random_bundle)
