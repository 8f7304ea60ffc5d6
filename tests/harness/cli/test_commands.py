"""Every command on the real parts, and what it says."""

import gzip
import hashlib
import json
import os
import platform
import pwd
import re
import shlex
import shutil
import signal
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from harness.cli.app import command_line, load_command, panels
from harness.cli.doctor import examine
from harness.devices.adb.client import AdbServer
from harness.devices.adb.connection import ServerAddress
from harness.devices.adb.server import ensure_server
from harness.devices.device import Device
from suites.models import tiny_llama
from tests.command_line import Done, Started
from tests.conftest import kill_server
from tests.harness.cli.conftest import Run
from tests.waiting import wait_for
from tools.commands import PAGE, page


def all_commands() -> Iterator[tuple[str, ...]]:
    yield ()
    for name in (name for panel in panels().values() for name in panel):
        yield (name,)
        for below in getattr(load_command(name), "commands", {}):
            yield name, below


# A whole path of a user is many commands, and a machine may be slow.
pytestmark = pytest.mark.timeout(900)
SMALL = ("--ar", "1,32", "--cl", "192", "--splits", "1")
"""The shape of `small_bundle`."""


def rows(db: Path, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(db)) as database:
        return database.execute(query).fetchall()


def test_help_fits_80_columns_and_has_an_example_that_parses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run = command_line()
    for command in all_commands():
        with pytest.raises(SystemExit, match="0"):
            run([*command, "--help"], prog_name="qnnfarm")
        shown = capsys.readouterr().out
        assert "Usage: qnnfarm" in shown
        assert [line for line in shown.splitlines() if len(line) > 80] == []
        assert not re.search(r"<class|: bool|list\[", shown), shown  # types of Python
        if len(command) == 1 and hasattr(load_command(command[0]), "commands"):
            continue
        (example,) = re.findall(r"^ +Example: qnnfarm ((?:.+\n)+)", shown, re.MULTILINE)
        words = shlex.split(example)
        assert tuple(words[: len(command)]) == command
        if not command:
            continue
        chosen: Any = load_command(words.pop(0))
        for name in command[1:]:
            chosen = chosen.commands[words.pop(0)]
            assert chosen.name == name
        chosen.make_context("qnnfarm", words)


def test_the_page_of_commands_is_current() -> None:
    """`python -m tools.commands` writes it."""
    assert PAGE.read_text(encoding="utf-8") == page()


@pytest.mark.genie_configuration("profile", "profile with trace")
def test_the_path_of_a_user(
    qnnfarm: Run, tmp_path: Path, virtual_device: Device, small_model: Path, small_bundle: object
) -> None:
    """Build, inspect, generate, bench, perplexity, report: each fed by the one before."""
    serial, container, db = virtual_device.serial, tmp_path / "container", tmp_path / "r.db"
    target = ("--target", "SM8750:emulator")
    built = qnnfarm("build", small_model, *target, *SMALL, "--out", container, "--json")
    assert built.returncode == 0, built.stderr
    (summary,) = json.loads(built.stdout)
    assert summary["stages_run"] == 0  # the fixture built it in the same cache

    shown = json.loads(qnnfarm("inspect", container, "--json").stdout)
    assert shown["metadata"]["container_sha256"] == summary["sha256"]
    graphs = [graph["name"] for graph in shown["binaries"]["small_llama_part_1_of_1.bin"]["graphs"]]
    assert sorted(graphs) == ["ar1_cl192_1_of_1", "ar32_cl192_1_of_1"]
    assert "ar32_cl192_1_of_1" in qnnfarm("inspect", container).stdout

    on_device = (container, "--device", serial)
    notes = tmp_path / "notes.txt"
    notes.write_text("of mine")
    prompt = ("--prompt", "\u0123\u0145", "--max-tokens", "6")
    generated = qnnfarm("generate", *on_device, *prompt)
    assert generated.returncode == 0, generated.stderr
    assert "its speed says nothing about hardware speed" in generated.stderr
    trace = tmp_path / "trace.json"
    traced = qnnfarm("generate", *on_device, *prompt, "--json", "--trace", trace)
    assert f"wrote {trace}" in traced.stderr
    names = Counter(event["name"] for event in json.loads(trace.read_text())["traceEvents"])
    assert names["QnnApi::graphExecute"] == 6
    assert {"push contents", "load", "prefill", "decode", "token 6"} <= names.keys()
    answer = json.loads(traced.stdout)
    assert answer["emulator"] is True
    assert generated.stdout == answer["text"] + "\n"
    assert answer["metrics"]["generated_tokens"] == 6

    short = ("-p", "8", "-n", "2", "-r", "2", "-w", "1", "--db", str(db))
    kept = ("--trace", tmp_path / "bench.json.gz", "--log-level", "info", "--push", notes)
    (bench,) = json.loads(qnnfarm("bench", *on_device, *short, *kept, "--json").stdout)[
        "benchmarks"
    ]
    (run,) = bench["sessions"]
    assert bench["workload"] == "pp8+tg2"
    assert bench["metrics"]["prompt_tokens"]["mean"] == 8
    assert bench["metrics"]["decode_tokens_per_s"]["n"] == 2
    measured = [m for m in run["measurements"] if m["metric"] == "prefill_tokens_per_s"]
    assert [m["is_warmup"] for m in measured] == [True, False, False]
    prompts = {m["value"] for m in run["measurements"] if m["metric"] == "prompt_tokens"}
    assert prompts == {8}
    assert run["status"] == "done"
    versions = run["provenance"]["library_versions"]
    assert versions["libGenie.so"].startswith("sha256:")
    assert versions["pushed notes.txt"] == f"sha256:{hashlib.sha256(b'of mine').hexdigest()[:16]}"
    assert rows(db, "SELECT count(*) FROM runs") == [(1,)]
    again = tmp_path / "again.json.gz"
    saved = qnnfarm("results", "show", run["id"], "--db", db, "--trace", again)
    assert saved.returncode == 0, saved.stderr
    traces = (gzip.decompress(path.read_bytes()) for path in (again, tmp_path / "bench.json.gz"))
    assert len(set(traces)) == 1

    text = small_model / "text" / "calibration.txt"
    window = ("--text", text, "--windows", "1", "--db", db, "--json")
    scoring = qnnfarm("perplexity", *on_device, *window, "--trace", trace)
    names = Counter(event["name"] for event in json.loads(trace.read_text())["traceEvents"])
    assert names["GenieAccuracy_compute"] == names["window 1"] == 1
    assert names["QnnApi::graphExecute"] >= 5  # of the 160 tokens 32 at a time
    scored = json.loads(scoring.stdout)
    assert scored["perplexity"] > 1

    page = tmp_path / "report.html"
    reported = qnnfarm("report", "--db", db, "--out", page, "--json")
    assert reported.returncode == 0, reported.stderr
    assert f"{scored['perplexity']:.3f}" in page.read_text()
    assert "Emulator speed is not hardware speed" in page.read_text()


@pytest.mark.needs("plugins.virtual_android")
def test_devices_are_started_listed_stopped_and_removed(
    qnnfarm: Run, adb_server: AdbServer
) -> None:
    name = f"cli-{os.getpid()}"
    started = qnnfarm("device", "start", name, "--soc", "SM8650")
    assert started.returncode == 0, started.stderr
    serial = started.stdout.splitlines()[-1]
    try:
        again = qnnfarm("device", "start", name, "--soc", "SM8650", "--json")
        assert json.loads(again.stdout)["serial"] == serial
        found = {row["serial"]: row for row in json.loads(qnnfarm("devices", "--json").stdout)}
        assert found[serial]["soc"] == "SM8650"
        assert found[serial]["emulator"] is True
        assert serial in qnnfarm("devices").stdout
        assert qnnfarm("device", "stop", name).returncode == 0
        wait_for(lambda: serial not in [entry.serial for entry in adb_server.devices()])
        listed = {row["name"]: row for row in json.loads(qnnfarm("device", "ls", "--json").stdout)}
        assert listed[name]["state"] == "stopped"
    finally:
        assert qnnfarm("device", "rm", name).returncode == 0
    assert name not in qnnfarm("device", "ls").stdout
    assert qnnfarm("device", "stop", name).returncode == 2


@pytest.mark.needs("libatomic1")
def test_several_targets_get_a_folder_each(
    qnnfarm: Run, tmp_path: Path, small_model: Path, small_bundle: object
) -> None:
    targets = ("--target", "SM8750", "--target", "SM8750:emulator")
    done = qnnfarm("build", small_model, *targets, *SMALL, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "SM8750" / "metadata.json").is_file()
    assert (tmp_path / "out" / "SM8750-emulator" / "metadata.json").is_file()


@pytest.mark.needs("libatomic1")
def test_doctor_finds_this_machine_well(process: Run) -> None:
    done = process("doctor", "--json")
    assert done.returncode == 0, done.stdout
    states = {finding["subject"]: finding["state"] for finding in json.loads(done.stdout)}
    assert states["QNN compiler"] == "ok"
    assert "broken" not in states.values()


def test_doctor_of_a_host_for_phones_alone(
    qnnfarm: Run, adb_server: AdbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    done = qnnfarm("doctor", "--json")
    assert done.returncode == 0, done.stdout
    host, *others = json.loads(done.stdout)
    assert (host["state"], "builds and virtual devices need" in host["advice"]) == ("note", True)
    subjects = {finding["subject"] for finding in others}
    assert subjects == {"Genie for phones", "cache", "pool ledger", "adb"}


@pytest.mark.parametrize("libc", [("glibc", "2.34"), ("", "")])
def test_doctor_names_the_glibc_of_the_libraries(
    monkeypatch: pytest.MonkeyPatch, libc: tuple[str, str]
) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: libc)
    host = next(examine())
    assert (host.state, "need glibc 2.35" in host.advice) == ("note", True)


@pytest.mark.needs("plugins.virtual_android")
@pytest.mark.needs("libatomic1")
def test_doctor_says_who_can_use_the_devices_of_an_adb_server(
    process: Run, adb_server: AdbServer
) -> None:
    at_a_port = process("doctor", QNNFARM_VIRTUAL_NAMESPACE="none").stdout
    assert "--unconfined" in at_a_port
    assert f" at {adb_server.adb_path}; server of adb " in at_a_port
    assert f" at {adb_server.address}," in at_a_port
    assert "every user of this host can use its devices" in at_a_port
    with tempfile.TemporaryDirectory(prefix="qnnfarm-doctor-") as folder:  # a short path
        own = ensure_server(ServerAddress(path=f"{folder}/socket"))
        try:
            at_a_socket = process("doctor", ADB_SERVER_SOCKET=own.address.spec).stdout
        finally:
            kill_server(own.address)
    user = pwd.getpwuid(os.geteuid()).pw_name
    assert f" at {own.address}," in at_a_socket
    assert f"; {user} alone can use its devices" in at_a_socket


def one_line_error(done: Done, *said: str) -> None:
    """It failed with one line on stderr that says this, and no traceback."""
    assert done.returncode in {1, 2}, done.stdout
    told = [line for line in done.stderr.splitlines() if line.startswith("qnnfarm: ")]
    errors = [line for line in told if not line.startswith("qnnfarm: warning: ")]
    assert len(errors) == 1, done.stderr
    assert "Traceback" not in done.stderr
    for word in said:
        assert word in errors[0], errors[0]


def test_bad_files_are_one_line(qnnfarm: Run, tmp_path: Path) -> None:
    """For the other refusals see `test_exit_codes.py`."""
    model, out = tiny_llama.folder(), tmp_path / "out"
    emulator = ("--target", "SM8750:emulator", "--out", out)
    corrupt = tmp_path / "corrupt"
    shutil.copytree(model, corrupt, ignore=shutil.ignore_patterns("*.py", "train.txt"))
    weights = corrupt / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    one_line_error(qnnfarm("build", corrupt, *emulator), "model.safetensors")
    a_file = tmp_path / "file"
    a_file.touch()
    fresh = {"QNNFARM_CACHE_DIR": str(tmp_path / "fresh")}
    nowhere = qnnfarm("build", model, *emulator[:2], *SMALL, "--out", a_file / "out", **fresh)
    one_line_error(nowhere, str(a_file / "out"), "cannot be written")
    assert not (tmp_path / "fresh").exists()  # before anything was built
    cache = {"QNNFARM_CACHE_DIR": str(a_file / "cache")}
    one_line_error(qnnfarm("build", model, *emulator, **cache), str(a_file))
    assert not out.exists()


def test_without_any_device_the_user_is_told_how_to_get_one(
    qnnfarm: Run, tmp_path: Path, tiny_bundle: Path, free_adb_port: int
) -> None:
    environment = {
        "ADB_SERVER_SOCKET": f"tcp:127.0.0.1:{free_adb_port}",
        "QNNFARM_STATE_DIR": str(tmp_path),  # no virtual device runs there
    }
    done = qnnfarm("generate", tiny_bundle, "--prompt", "x", **environment)
    one_line_error(done, "qnnfarm device start")


def test_a_refused_measurement_leaves_no_database(
    qnnfarm: Run, adb_server: object, small_bundle: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("In the beginning. " * 500)
    commands = (["bench"], ["compare", small_bundle], ["perplexity", "--text", text])
    for command, *more in commands:
        db = tmp_path / f"{command}.db"
        done = qnnfarm(
            command, small_bundle, *more, "--db", db, "--device", "nosuch", "--wait", "0"
        )
        assert done.returncode == 2, done.stderr
        assert "'nosuch'" in done.stderr
        assert not db.exists()
    done = qnnfarm("bench", small_bundle, "--db", tmp_path / "no" / "x.db", "--device", "nosuch")
    assert "its folder does not exist" in done.stderr


def test_a_full_device_is_one_line_and_a_failed_run(
    qnnfarm: Run,
    tmp_path: Path,
    tiny_bundle: Path,
    make_virtual_device: Callable[..., tuple[object, Device]],
) -> None:
    _, device = make_virtual_device(storage_bytes=20 << 20)
    on_device, db = (tiny_bundle, "--device", device.serial), tmp_path / "r.db"
    one_line_error(qnnfarm("generate", *on_device, "--prompt", "x"), device.serial, "full")
    one_line_error(qnnfarm("bench", *on_device, "--db", db), device.serial, "full")
    ((status, error),) = rows(db, "SELECT status, error FROM runs")
    assert status == "failed"
    assert "full" in str(error)


def test_an_interrupted_bench_leaves_nothing_on_the_device(
    adb_environment: Path, tmp_path: Path, virtual_device: Device, small_bundle: Path
) -> None:
    db = tmp_path / "r.db"
    words = ("bench", small_bundle, "--db", db, "--device", virtual_device.serial)
    with Started(*words, "-r", "50", "-w", "1") as process:
        assert "repetition 1, at most 51" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        process.wait(timeout=250)
    assert process.returncode == 130
    assert rows(db, "SELECT status FROM runs") == [("interrupted",)]
    left = virtual_device.shell(f"ls {virtual_device.work_root}/runs").stdout
    assert "run-" not in left
