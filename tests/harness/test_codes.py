"""Error numbers are what the libraries say, and hostile logs cost a pass and raise nothing."""

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from buildlib.toolchains.ort_qnn.wheel import find_libraries
from device_scripts import genie_api
from harness.cli.app import _explained, build_app
from harness.codes import explain_end, find_codes, load_codes, parse_code
from harness.errors import RunnerError
from harness.results.store import ResultsStore
from tests.command_line import qnnfarm
from tests.harness.cli.test_commands import all_commands
from tests.harness.results.places import make_run

_COMMAND = re.compile(r"`qnnfarm ([a-z-]+(?: [a-z-]+)*)")
_ASK_LIBRARY = """
import ctypes, sys
from pathlib import Path
from buildlib.toolchains.qnn.api import load_backend
message_of = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_uint64, ctypes.POINTER(ctypes.c_char_p))
get = message_of(load_backend(Path(sys.argv[1])).interface.fn[48])  # QnnError_getMessage
text = ctypes.c_char_p()
for number in range(1, 40000):
    if get(number, ctypes.byref(text)) == 0 and text.value:
        print("code", number, text.value.decode().partition(":")[0])
"""


def test_the_table_has_the_numbers_and_names_of_the_library_itself() -> None:
    libraries = find_libraries()
    done = subprocess.run(
        [sys.executable, "-c", _ASK_LIBRARY, libraries.htp],
        env={"LD_LIBRARY_PATH": libraries.search_path, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    said = dict(re.findall(r"^code (\d+) (\w+)$", done.stdout, re.MULTILINE))
    system = range(30000, 40000)  # of libQnnSystem.so, which cannot be asked
    table = {
        str(code.number): code.name
        for code in load_codes()
        if code.library == "QNN" and code.number is not None and code.number not in system
    }
    assert len(said) > 100
    assert table == {number: name for number, name in said.items() if int(number) not in system}


def test_genies_statuses_are_those_of_its_runners() -> None:
    table = {code.number: code.name for code in load_codes() if code.library == "Genie"}
    table.pop(None)
    assert table == {n: name for n, name in genie_api.STATUS_NAMES.items() if n != 0}


def test_every_cause_has_evidence_a_fix_and_a_source() -> None:
    codes = load_codes()
    assert len({(c.library, c.number, c.name) for c in codes}) == len(codes)
    for code in codes:
        assert code.causes or code.source, code.label
        assert code.meaning or not code.causes, code.label
        for cause in code.causes:
            assert cause.cause.endswith((".", "`.")), cause
            assert all((cause.look_at, cause.fix)), cause
            assert re.fullmatch(r"https://\S+|reproduced: .+", cause.source), cause


@pytest.mark.needs("plugins.diagnosis")
def test_the_table_names_commands_that_exist() -> None:
    texts = [f"{cause.look_at} {cause.fix}" for code in load_codes() for cause in code.causes]
    named = {tuple(words.split()) for text in texts for words in _COMMAND.findall(text)}
    assert len(named) > 5
    assert named <= set(all_commands())


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("5005", "QNN 5005"),
        ("0x138D", "QNN 5005"),
        ("QNN_CONTEXT_ERROR_CREATE_FROM_BINARY", "QNN 5005"),
        ("-8", "Genie -8"),
        ("GENIE_STATUS_ERROR_JSON_SCHEMA", "Genie -8"),
        ("134", "exit status 134"),
        ("0x80000406", "FastRPC 0x80000406"),
        ("-2147482618", "FastRPC 0x80000406"),
        ("AEE_EUNABLETOLOAD", "FastRPC 0x80000406"),
        ("fastrpc:6", "FastRPC 0x80000406"),
    ],
)
def test_a_code_is_named_in_any_of_its_forms(text: str, label: str) -> None:
    (code,) = parse_code(text)
    assert code.label == label
    assert code.causes
    assert parse_code(code.argument) == (code,)


def test_a_number_without_an_entry_is_said_to_be_unknown() -> None:
    for text, label in (("7777", "QNN 7777"), ("fastrpc:0x8000ffff", "FastRPC 0x8000ffff")):
        (code,) = parse_code(text)
        assert (code.label, code.known) == (label, False)
    for text in ("", "zz", "foo:5005", "results.db", "5005x", "--5", "٣", "930128", "512"):
        assert parse_code(text) == ()


@pytest.mark.parametrize(
    ("line", "labels"),
    [  # as in public threads, whose addresses are in the table
        (
            '[ERROR] "Could not create context from binary for context index = 0 : err 5000"',
            ["5000"],
        ),
        ("E QnnDsp : <E> DspTransport.openSession qnn_open failed, 0x80000416", ["0x80000416"]),
        ("<E> Unable to load Remote symbols 4000", ["4000"]),
        ("Status Message: QNN graph execute error. Error code: 6001", ["6001"]),
        ("<E> Failed to get context binary size with err 0x138b", ["5003"]),
        ("Failed to create device_handle for Backend ID 6, error=1008", ["1008"]),
        ("calculator example failed with nErr = -2147482112", ["0x80000600"]),
        ("<E> Unsupported config option 2", ["Unsupported config option"]),
        ("<E> DspTransport failed,cannot open session, error 0xffffffff", []),
        ("error 2048 ms, status 2026-10-11, failed: 9999 bytes, code 1007.5, err 10051", ["10051"]),
    ],
)
def test_codes_are_read_as_libraries_print_them(line: str, labels: list[str]) -> None:
    shown = [finding.code.label.rpartition(" ")[2] for finding in find_codes([line])]
    assert shown == [label.rpartition(" ")[2] for label in labels]


def test_the_first_code_is_the_nearest_to_the_cause() -> None:
    log = (
        "<E> DspTransport.openSession qnn_open failed, 0x80000406, prio 100\n"
        "<E> Failed to create transport for device, error: 4000\n"
        "<E> Transport layer setup failed: 14001\n"
        "Aborted\n"
    )
    labels = [finding.code.label for finding in find_codes(log.splitlines())]
    assert labels == ["FastRPC 0x80000406", "QNN 4000", "QNN 14001"]
    assert explain_end(log, 134).startswith("FastRPC 0x80000406: ")
    assert explain_end("nothing known", 134).startswith("exit status 134: ")
    assert explain_end("nothing known", 1) == ""
    warned = '[ERROR] "Unable to load backend extensions lib: [x]"\n'
    assert explain_end(f"{warned}{log}", 134) == explain_end(log, 134)
    assert explain_end(warned, 1) == ""
    error = RunnerError("serial", "genie-t2t-run", "ended with status 134", 134, log)
    assert str(error).endswith("(`qnnfarm explain fastrpc:0x80000406`)")


def test_every_error_of_the_command_line_names_its_number_once() -> None:
    said = _explained("ar1 does not compile (GRAPH_FINALIZE returned QNN error 1002)")
    assert said.endswith("(`qnnfarm explain qnn:1002`)")
    assert _explained(said) == said
    assert _explained("no such folder") == "no such folder"


@given(st.text(), st.sampled_from([c for c in load_codes() if c.library == "QNN" and c.number]))
def test_a_known_number_is_found_in_any_surroundings(noise: str, code: object) -> None:
    number = code.number  # type: ignore[attr-defined]
    log = f"{noise}\n[ERROR] QNN error {number}\n{noise}"
    assert code in [finding.code for finding in find_codes(log.splitlines())]


def explain(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(build_app(), ["explain", *map(str, arguments)])
    return done.exit_code, done.output


@pytest.mark.needs("plugins.diagnosis")
def test_the_command_explains_a_code_a_log_and_a_run(tmp_path: Path) -> None:
    assert explain("-8")[0] == 0
    status, said = explain("5005")
    assert status == 0
    assert "https://github.com/qualcomm/ai-hub-apps/issues/15" in said
    assert explain("7777")[0] == 1
    for unknown in ("99999", "latest"):
        done = qnnfarm("explain", unknown, "--db", tmp_path / "none.db")
        assert done.returncode == 2
        assert "no file, and no stored run" in done.stderr
    log = tmp_path / "any.log"
    log.write_bytes(b"\xff\x00" * 9_000_000 + b"\n[ERROR] ... : err 5005\nx")
    status, said = explain(log)
    assert status == 0
    assert "any.log, line 2: [ERROR]" in said
    db = str(tmp_path / "results.db")
    run = make_run()
    with ResultsStore.open(db) as store:
        with contextlib.suppress(RunnerError), store.recording(run) as recorder:
            recorder.add_artifact("logcat.txt", b"E qnn_open failed, 0x80000406", "log")
            raise RunnerError("s", "genie-t2t-run", "died", 1, "[ERROR] error: 4000")
        assert "qnnfarm explain qnn:4000" in (store.get_run(run.id).error or "")
    for which in (run.id, "latest"):
        status, said = explain(which, "--db", db, "--json")
        assert status == 0
        assert [code["label"] for code in json.loads(said)] == ["FastRPC 0x80000406", "QNN 4000"]


@pytest.mark.needs("plugins.diagnosis")
@pytest.mark.parametrize(
    ("line", "label"),
    [
        ("graph requires estimated allocation of 2347229 KB, limit is 2097152 KB", "requires esti"),
        ("Missing QnnHtp field: pos-id-dim", "Missing * field:"),
        ('[ERROR] "Unable to find a valid interface."', "Unable to find a valid interface"),
        ("(dlerror ELF verification: section header for CRC segment not found)", "CRC segment"),
        ("Invalid Node IO value passed: GENIE_NODE_X", "Invalid Node IO value"),
    ],
)
def test_lines_that_people_post_are_explained(line: str, label: str) -> None:
    """As an argument, in a file, among others."""
    others = ["the field: is missing a value", "Missing " + "word " * 20 + "field: x"]
    (finding,) = find_codes([*others, line, "the key was not found"])
    assert finding.code.label.startswith(label)
    assert finding.code.causes
    shown = CliRunner().invoke(build_app(), ["explain", line])
    assert (shown.exit_code, finding.code.causes[0].fix in shown.stdout) == (0, True)
