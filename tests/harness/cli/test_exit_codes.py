"""One rule for all commands, tried with each of them: docs/exit-codes.md; refusals are one line."""

import os
import re
import shlex
from itertools import chain
from pathlib import Path

import pytest

from harness.cli.app import PANELS, panels
from harness.devices.adb.client import AdbServer
from harness.errors import BAD, GOOD, MEANINGS, NO_ANSWER
from harness.results.verdicts import Verdict, verdict_exit_code
from suites.models import tiny_llama
from tests.buildlib.op_packages import PROVIDER
from tests.command_line import Started, start
from tests.harness.cli.conftest import Run
from tests.harness.cli.test_bad_input import MAIN, NO_COMPILER
from tests.harness.cli.test_commands import all_commands
from tests.system import VIRTUAL, needs

_PLAN = "pool: pool.yaml\ntimeouts: {lease_s: 5}\nworkloads: "
FILES = {
    "pool.yaml": "devices:\n  - {name: here, type: local}\n"
    "  - {name: gone, type: android, identifier: no-such-phone}\n"
    "recovery: {steps: [reconnect], return_timeout_s: 0.1}\n",
    "good.yaml": f"name: good\n{_PLAN}[{{kind: command, command: ['true']}}]",
    "bad.yaml": f"name: bad\n{_PLAN}[{{kind: command, command: ['false']}}]",
    "nowhere.yaml": "name: nowhere\ndevices: [{soc: SM8650}]\n"
    + f"{_PLAN}[{{kind: command, command: ['true']}}]".replace("lease_s: 5", "lease_s: 0.5"),
    "unclosed.yaml": "speculative_config: {draft_len: 6",
    "twice.yaml": "max_workers: 1\nmax_workers: 2",
    "lost.yaml": "attached_builders: [{arn: 1, model_path: none.onnx}]",
    "strange.yaml": "no_option: 1",
    "dialgo.json": '{"dialgo": {}}',
    "empty.txt": "\n",
    "empty.zip": "PK\5\6" + "\0" * 18,
    "entry/part.bin": "",
}
MODEL = str(tiny_llama.folder())
BUILD = f"build {MODEL} --target SM8750:emulator --out out"
SPEECH = "perplexity {tiny_bundle} --text empty.txt"
PACKAGE = f"op-package run {{library}} --provider {PROVIDER}"
GENERATE = "generate no/container"
DB = "--db results.db"

TABLE: tuple[tuple[int, str, str], ...] = (
    (GOOD, "--version", ""),
    (GOOD, "cache ls", ""),
    (GOOD, "cache verify", ""),
    (GOOD, "device ls", ""),
    (GOOD, "devices local", ""),
    (GOOD, "explain -6", ""),
    (GOOD, "libraries ls", ""),
    (GOOD, "pool drain here --reason x", ""),
    (GOOD, "pool history here", ""),
    (GOOD, "pool new-id", ""),
    (GOOD, "pool probe", ""),
    (GOOD, "pool release here", ""),
    (GOOD, "pool reserve here --for 1m", ""),
    (GOOD, "pool show", ""),
    (GOOD, "pool test-notifications", ""),
    (GOOD, f"run good.yaml {DB}", ""),
    (BAD, "devices local no-such-phone", ""),
    (BAD, "explain 7777", ""),
    (BAD, "pool recover gone", ""),
    (BAD, f"run bad.yaml {DB}", ""),
    (NO_ANSWER, "", ""),
    (NO_ANSWER, "bnech", "no such command 'bnech': did you mean 'bench'? `qnnfarm -h` shows"),
    (NO_ANSWER, "pool show --pol x", "no such option: --pol: did you mean --pool?"),
    (NO_ANSWER, "bench . --\x1b[31m\n", "no such option: --"),
    (NO_ANSWER, "alerts acknowledge 12ab --db nothing.db", "no results database"),
    (NO_ANSWER, "alerts expect 12ab --db nothing.db", "no results database"),
    (NO_ANSWER, "alerts fix 12ab --db nothing.db", "no results database"),
    (NO_ANSWER, "alerts ls --db nothing.db", "no results database"),
    (NO_ANSWER, "alerts reopen 12ab --db nothing.db", "no results database"),
    (NO_ANSWER, "bench", "missing argument 'CONTAINER_DIR'; `qnnfarm bench -h` shows"),
    (NO_ANSWER, f"bench nothing {DB}", "nothing"),
    (NO_ANSWER, "bench . --wait soon", "value for '--wait': must be a number, not 'soon'"),
    (NO_ANSWER, "bench . --sessions 0", "value for '--sessions': must be at least 1, not '0'"),
    (NO_ANSWER, "bench . --max-warmup -1", "--max-warmup: must be at least 0, not -1"),
    (NO_ANSWER, "bench . -d 64 -p 2", "--prompt-tokens: after a depth"),
    (NO_ANSWER, "build nothing --target SM8750 --out out", "no such file or folder"),
    (NO_ANSWER, f"{BUILD} --target SM9999", "SM8750"),
    (NO_ANSWER, f"{BUILD} --ar 1,50 --cl 192", "AR must divide CL"),
    (NO_ANSWER, f"{BUILD} --ar 1,x", "--ar takes whole numbers from 1 with commas"),
    (NO_ANSWER, f"{BUILD} --ar 1,-32", "not '1,-32'"),
    (NO_ANSWER, f"{BUILD} --ar 1,32 --cl 192 --splits 9", "9 parts"),
    (NO_ANSWER, f"{BUILD} -O graphs.nothing=1", "graphs.nothing"),
    (NO_ANSWER, f"{BUILD} -O nothing", "KEY=VALUE"),
    (NO_ANSWER, f"{BUILD} --recipe w4a61", "w4a16"),
    (NO_ANSWER, f"{BUILD} --options unclosed.yaml", "line 1"),
    (NO_ANSWER, f"{BUILD} --options twice.yaml", "line 2"),
    (NO_ANSWER, f"{BUILD} --options lost.yaml", "/none.onnx"),
    (NO_ANSWER, f"{BUILD} --options strange.yaml", "no_option"),
    (NO_ANSWER, f"{BUILD} --reference-with transformers", "--verify"),
    (NO_ANSWER, f"{BUILD} --reference-with jax", "onnx"),
    (NO_ANSWER, "bundle show nothing", ""),
    (NO_ANSWER, "aot compile -m nothing -c nothing --aot_config nothing", ""),
    (NO_ANSWER, "aot convert --input-path nothing --output-path out", ""),
    (NO_ANSWER, "aot init nothing", ""),
    (NO_ANSWER, "aot push -m nothing.bin -c nothing --build nothing --unchecked", ""),
    (NO_ANSWER, "aot quantize --model-path nothing --output-dir out", ""),
    (NO_ANSWER, "aot run -m nothing.bin -c nothing --prompt x", ""),
    (NO_ANSWER, "aot inspect nothing", "nothing"),
    (NO_ANSWER, "cache prune --to much", "--to"),
    (NO_ANSWER, "cache prune --all --to 1GB", "--all"),
    (NO_ANSWER, "cache show nothing", "no entry 'nothing'"),
    (NO_ANSWER, "qairt-layout nothing stages", "nothing"),
    (NO_ANSWER, f"compare nothing nothing {DB}", "nothing"),
    (NO_ANSWER, "compare a b --sessions 2", "verdict over 2 metrics needs at least 6 pairs"),
    (NO_ANSWER, "compare a b --metric foo", "unknown metric 'foo': known are prefill_tokens_per_s"),
    (NO_ANSWER, "config check nothing", "nothing"),
    (NO_ANSWER, "config check dialgo.json", "did you mean dialog?"),
    (NO_ANSWER, "debug tensor nothing --reference nothing", ""),
    (NO_ANSWER, "demo --no-such-option", "--no-such-option"),
    (NO_ANSWER, "demo --out empty.txt", "empty.txt"),
    (NO_ANSWER, "device fault nobody", "nobody"),
    (NO_ANSWER, "device heat nobody", "nobody"),
    (NO_ANSWER, "device power nobody", "nobody"),
    (NO_ANSWER, "device rm nobody", "nobody"),
    (NO_ANSWER, "device start n --soc SM1", "SM1"),
    (NO_ANSWER, "device start ../escape", "../escape"),
    (NO_ANSWER, "device stop nobody", "nobody"),
    (NO_ANSWER, "devices linux:-x", "names no device"),
    (NO_ANSWER, "devices '$(id)'", "names no device"),
    (NO_ANSWER, "devices a\x1b[2Jb", "names no device"),
    (NO_ANSWER, "embed nothing text", "nothing"),
    (NO_ANSWER, "embed . x --min-cosine 0", "--min-cosine is the cosine with float"),
    (NO_ANSWER, "embed {tiny_bundle} a", "holds a dialog, which embeds no texts"),
    (NO_ANSWER, "embed . --file empty.txt", "holds no text: give 1 to 10000 texts"),
    (NO_ANSWER, "evaluate nothing nothing", "nothing"),
    (NO_ANSWER, f"evaluate . {Path('suites/tasks').absolute()} --max-tokens 9 --system x",
     "--system is the system message of a chat: give --chat, too"),
    (NO_ANSWER, "export nothing --out exported", "nothing"),
    (NO_ANSWER, "gate --baseline previous --db nothing.db", "no results database"),
    (NO_ANSWER, f"{GENERATE} --prompt x", "no/container"),
    (NO_ANSWER, GENERATE, "give a prompt: --prompt, --prompt-file, --tokens or --embeddings"),
    (NO_ANSWER, f"{GENERATE} --prompt a --tokens 1", "not --prompt and --tokens together"),
    (NO_ANSWER, f"{GENERATE} --prompt a --rewind", "--rewind needs several prompts"),
    (NO_ANSWER, f"{GENERATE} --prompt a --temp -1", "--temp: must be"),
    (NO_ANSWER, f"{GENERATE} --prompt a --lora red=x", "no NAME=STRENGTH"),
    (NO_ANSWER, f"{GENERATE} --embeddings e --save s", "go without --save and --restore"),
    (NO_ANSWER, f"{GENERATE} --tokens 1 --stop a", "looks for it in answers to texts alone"),
    (NO_ANSWER, f"{GENERATE} --prompt caf\udce9", "not UTF-8"),
    (NO_ANSWER, "generate {tiny_bundle} --device nowhere --prompt x", "nowhere"),
    (NO_ANSWER, "generate {encoder_bundle} --prompt a", "a text encoder, which answers no prompts"),
    (NO_ANSWER, "history decode --db nothing.db", "no results database"),
    (NO_ANSWER, "import-container nothing --out container", ""),
    (NO_ANSWER, "inspect nothing", "cannot use the file 'nothing': no such file or folder"),
    (NO_ANSWER, "inspect empty.zip", ""),
    (NO_ANSWER, "inspect entry", "metadata.json"),
    (NO_ANSWER, "inspect dialgo.json", "containers, context binaries, DLCs and entries"),
    (NO_ANSWER, "libraries fetch --no-such-option", "--no-such-option"),
    (NO_ANSWER, "nightly nothing.yaml", "nothing.yaml"),
    (NO_ANSWER, "op-package check nothing --provider x", "nothing"),
    (NO_ANSWER, "op-package run nothing --provider x --formula x", "nothing"),
    (NO_ANSWER, f"{PACKAGE} --formula '3 * z'", "'z' is not defined"),
    (NO_ANSWER, f"{PACKAGE} --formula 'x / 0'", "not all numbers are finite"),
    (NO_ANSWER, f"{PACKAGE} --formula x --input x=missing.npy", "No such file"),
    (NO_ANSWER, f"{PACKAGE} --formula x --operation Other", "qnnfarm.scale::Scale"),
    (NO_ANSWER, "perplexity nothing --text nothing", "nothing"),
    (NO_ANSWER, "perplexity {tiny_bundle} --text none.txt", "none.txt"),
    (NO_ANSWER, f"{SPEECH} --max-perplexity 5%", "5% is relative to the float model"),
    (NO_ANSWER, f"{SPEECH} --reference-with transformers", "computes the reference: give"),
    (NO_ANSWER, "pipeline sensitivity nothing.yaml", "nothing.yaml"),
    (NO_ANSWER, "pipeline verify nothing.yaml", "nothing.yaml"),
    (NO_ANSWER, "pipeline init nothing --out empty.txt", "is there already"),
    (NO_ANSWER, "pipeline run nothing.yaml", "nothing.yaml"),
    (NO_ANSWER, "pipeline stages --no-such-option", "--no-such-option"),
    (NO_ANSWER, "pool recover nobody", "nobody"),
    (NO_ANSWER, "pool show --pool nothing.yaml", "nothing.yaml"),
    (NO_ANSWER, "pool undrain nobody", "nobody"),
    (NO_ANSWER, "pool lease --name nobody", "nobody"),
    (NO_ANSWER, "pool unquarantine here", "here"),
    (NO_ANSWER, "pool unreserve 99", "99"),
    (NO_ANSWER, "profile nothing", ""),
    (NO_ANSWER, "conformance nothing --out out", ""),
    (NO_ANSWER, "rehearse nothing", ""),
    (NO_ANSWER, "report --db nothing.db", "nothing.db"),
    (NO_ANSWER, "results export - --db nothing.db", "stdout has no suffix"),
    (NO_ANSWER, "results export out.xlsx", "out.xlsx has no suffix of .parquet, .csv, .jsonl"),
    (NO_ANSWER, "results export out.csv --since yesterday", "--since"),
    (NO_ANSWER, "results import nothing.json --db nothing.db", "nothing.json"),
    (NO_ANSWER, "results ls --db nothing.db", "no results database"),
    (NO_ANSWER, "results prune", "--older-than"),
    (NO_ANSWER, "results prune --older-than 9d --db nothing.db", "no results database"),
    (NO_ANSWER, "results prune --older-than 9999999d", "nothing can be that old"),
    (NO_ANSWER, "results show 12ab --db nothing.db", "no results database"),
    (NO_ANSWER, "serve --tokens nothing", ""),
    (NO_ANSWER, f"run nothing.yaml {DB}", "nothing.yaml"),
    (NO_ANSWER, f"run nowhere.yaml {DB}", ""),
    (NO_ANSWER, "train draft nothing --text nothing --out out", ""),
    (NO_ANSWER, "train draft . --text nothing --out entry", "something else than a draft head"),
    (NO_ANSWER, "train forecast nothing --text nothing --out out", "a file that ends in .safetens"),
    (NO_ANSWER, "verify nothing", ""),
    (NO_ANSWER, f"verify {{tiny_bundle}} --reference {{tiny_bundle}} {DB}", "--db keeps distances"),
    (NO_ANSWER, "verify {tiny_bundle}", "--reference CHECKPOINT_DIR, or a container"),
    (NO_ANSWER, f"verify {MODEL} --reference x", "--reference is for containers"),
    (NO_ANSWER, "worker --db nothing.db", ""),
)  # fmt: skip
OF_PLUGINS = {*chain(*PANELS.values())} - {*chain(*panels().values())}
"""Commands that this checkout is without."""
TABLE = tuple(row for row in TABLE if row[1].partition(" ")[0] not in OF_PLUGINS)


def test_every_command_is_in_the_table() -> None:
    commands = set(all_commands())
    groups = {command[:-1] for command in commands if command}
    tried = {tuple(line.split()) for _, line, _ in TABLE} | {("doctor",)}
    for command in commands - groups:
        assert any(line[: len(command)] == command for line in tried), command


@pytest.mark.parametrize(
    ("code", "line", "said"), TABLE, ids=[line.replace(MODEL, "MODEL")[:80] for _, line, _ in TABLE]
)
def test_the_code_says_what_the_answer_is(
    qnnfarm: Run,
    adb_server: AdbServer,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    code: int,
    line: str,
    said: str,
) -> None:
    if line.startswith("demo --out"):
        needs(VIRTUAL)
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    before = set(tmp_path.iterdir())
    line = re.sub(r"\{(\w+)\}", lambda match: str(request.getfixturevalue(match[1])), line)
    state = str(tmp_path / "state")
    done = qnnfarm(*shlex.split(line), QNNFARM_STATE_DIR=state, QNNFARM_POOL="pool.yaml")
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    if said:
        *slow, error = done.stderr.splitlines()
        assert all(line.startswith("looking for") for line in slow)  # on a busy machine
        assert error.startswith("qnnfarm: ")
        assert error.isprintable()
        assert said in error
        assert not done.stdout
        assert {path.name for path in set(tmp_path.iterdir()) - before} <= {"state"}


def test_an_answer_that_nobody_reads_is_none(tmp_path: Path) -> None:
    """Its reader has left, as `true` does behind a pipe, or its disk is full."""
    reader, pipe = os.pipe()
    os.close(reader)
    with (
        os.fdopen(pipe, "wb") as left,
        (tmp_path / "err").open("wb") as err,
        Path("/dev/full").open("wb", buffering=0) as full,
    ):
        for words, streams in (
            (["bnech"], (err, left)),
            (["--help"], (left, err)),
            (["--version"], (full, err)),
        ):
            process = start(words, cwd=tmp_path, env=os.environ, streams=streams)
            process.join(250)
            assert process.exitcode == NO_ANSWER, words
    assert (tmp_path / "err").read_text() == "qnnfarm: the system: No space left on device\n"


def test_doctor_without_the_compiler(adb_server: AdbServer) -> None:
    """A host for phones has none, which breaks nothing; a pool that cannot be read does."""
    for pool, code in (("", GOOD), ("nothing.yaml", BAD)):
        environment = os.environ | {"QNNFARM_POOL": pool}
        with Started("-c", NO_COMPILER + MAIN, "doctor", env=environment) as doctor:
            said, _ = doctor.communicate(timeout=250)
        assert doctor.returncode == code
        assert "onnxruntime-qnn is not installed — for builds" in said


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
