"""README and docs, as printed: every command and every snippet is checked, and run.

The suite parses every command by the real command line, reads every YAML and JSON block by what
reads such files, and resolves every import. `test_a_document_runs` then reads a document as a
newcomer would: it runs its `sh` and `console` blocks in one shell, in order, and its Python beside
them, and compares what commands print with what the document shows (`tests.documents`). A scene
puts into the working folder what a document presupposes. `make documents` runs all of them.

`<!-- not run: REASON -->` before a block says why it is not run, and `<!-- needs: CONDITION -->`
names what of `tests.system` it needs.
"""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from typer.core import TyperGroup

from buildlib.builder_options import apply_options, flatten_options
from buildlib.container.container import GenAIContainer
from buildlib.genai import GenAIBuilderFactory
from harness.cli.app import command_line
from harness.deploy.deploy import deploy
from harness.devices.adb.server import ensure_server, own_address
from harness.devices.device import Device
from harness.errors import UnknownVirtualDeviceError
from harness.plans.plan_file import load_plan
from harness.pool.config import load_config
from harness.results.metrics import Measurement
from harness.results.records import DeviceInfo, WorkloadRecord
from harness.results.store import ResultsStore
from harness.runtimes.description import read_description
from plugins.virtual_android import manager
from suites.models import tiny_llama
from tests.command_line import qnnfarm
from tests.conftest import kill_server
from tests.documents import DOCUMENTS, ROOT, Block, Shell, blocks, commands, difference
from tests.harness.results.places import make_run
from tests.postgresql_server import running_postgresql_server
from tests.system import CONDITIONS, needs
from tools.tiny_llama.gguf_file import write_gguf

pytestmark = pytest.mark.first
EXPORT = ROOT / "tests" / "fixtures" / "exports" / "torchscript-llama-fixed"


def qnnfarm_words(line: str) -> Iterator[list[str]]:
    """Yield the words of each `qnnfarm` command of a line."""
    for part in re.split(r"&&|\|", line):
        words = shlex.split(part, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        if words and words[0].endswith("qnnfarm"):
            yield words[1:]


def parse(words: list[str]) -> None:
    command: Any = command_line()
    context = None
    name: str | None = "qnnfarm"
    while isinstance(command, TyperGroup):
        settings = command.context_settings
        context = command.context_class(command, parent=context, info_name=name, **settings)
        name, found, words = command.resolve_command(context, words)
        assert found is not None, name
        command = found
    command.make_context(name, list(words), parent=context)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_parses(path: Path) -> None:
    for block in blocks("sh", "console"):
        if block.path == path:
            for command in commands(block):
                for words in qnnfarm_words(command.text):
                    parse(words)


def test_commands_and_their_output_are_in_blocks_of_their_kind() -> None:
    assert [
        str(block) for block in blocks("", "text", "bash") if re.search("(?m)^\\$ ", block.text)
    ] == []


def test_every_python_block_has_names_that_are_there() -> None:
    for block in blocks("python"):
        tree = ast.parse(block.text)
        imports: list[ast.stmt] = [
            node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        if block.why is None or "installed" not in block.why:
            exec(compile(ast.Module(imports, []), str(block), "exec"), {})  # noqa: S102


@dataclass
class Reader:
    """Somebody who types what a document says, in a folder of their own.

    Attributes:
        words: of the document, and what stands for each here, such as a serial.
        scope: names that Python blocks presuppose.
        statuses: exit statuses of commands that do not end with 0, by a part of the command.
    """

    request: pytest.FixtureRequest
    patch: pytest.MonkeyPatch
    folder: Path
    words: dict[str, str] = field(default_factory=dict)
    scope: dict[str, object] = field(default_factory=dict)
    statuses: dict[str, set[int]] = field(default_factory=dict)

    def give(self, name: str, source: Path) -> None:
        """Put a copy of a file or a folder into the working folder."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, path)

    def write(self, name: str, content: object) -> None:
        """Put a file of JSON, which is YAML, into the working folder."""
        (self.folder / name).write_text(json.dumps(content))

    def device(self) -> Device:
        """Return a virtual device, which is the one that commands choose."""
        device: Device = self.request.getfixturevalue("virtual_device")
        self.patch.setenv("ANDROID_SERIAL", "virtual:shared")
        self.words["virtual:alpha"] = "virtual:shared"
        return device

    def bundle(self, *names: str) -> Path:
        """Put the reference model's container into the working folder, under these names."""
        bundle: Path = self.request.getfixturevalue("tiny_bundle")
        for name in names:
            self.give(name, bundle)
        return bundle

    def model(self, *names: str) -> None:
        """Put the reference model into the working folder, under these names."""
        for name in names:
            self.give(name, tiny_llama.folder())

    def checkout(self) -> None:
        """Work in a checkout, of which documents name the suites."""
        (self.folder / "suites").symlink_to(ROOT / "suites")

    def pool(self, **member: object) -> None:
        """Write a pool of the device."""
        device = {"type": "android", "identifier": self.device().serial, **member}
        self.write("pool.yaml", {"devices": [device]})

    def text(self, *names: str) -> None:
        """Put a page of held-out text into the working folder, under these names."""
        page = (tiny_llama.folder() / "text" / "heldout.txt").read_text()[:2000]
        for name in names:
            (self.folder / name).write_text(page)

    def installed(self) -> None:
        """Install nothing: `make wheel-check` does."""
        self.words["pip install"] = ": pip install"

    def removes_alpha(self) -> None:
        """Remove the device that the document starts, at the end."""

        def remove() -> None:
            with suppress(UnknownVirtualDeviceError):
                manager.remove("alpha")

        self.request.addfinalizer(remove)

    def as_printed(self, text: str) -> str:
        """Return a text of the document with what stands for its words."""
        for word, stands in self.words.items():
            text = text.replace(word, stands)
        return text


Scene = Callable[[Reader], None]
SCENES: dict[str, Any] = {}


def scene(name: str, *, slow: bool = False) -> Callable[[Scene], Scene]:
    """Declare what a document presupposes; `slow` ones are read by `make documents`.

    That of a plugin which is not here is none.
    """

    def declare(prepare: Scene) -> Scene:
        marks = [pytest.mark.slow, pytest.mark.timeout(3600)] if slow else []
        if name in {path.name for path in DOCUMENTS}:
            SCENES[name] = pytest.param(name, prepare, marks=marks, id=name)
        return prepare

    return declare


def stored_nights(
    path: Path, last: datetime, *, commit: str = "b7" * 20, genie: str = "1.22", prompt: int = 512
) -> list[str]:
    """Store 30 nights of two phones that lose 5 % in the last three; return the runs' ids."""
    base = make_run()
    model = {"model": "my-llama", "target": "SM8750", "ars": (1, 128), "cl": 4096}
    phone: dict[str, Any] = {"emulator": False, "model": "SM-S938B", "manufacturer": "Samsung"}
    with ResultsStore.open(path) as store:
        for night in range(30):
            level = (50.95 if night < 27 else 48.5) + (0.5, -0.3, 0.1, -0.5)[night % 4]
            source = {
                "library_versions": {"genie": "1.21" if night < 27 else genie}, "host": "lab",
                "git_commit": commit if night == 29 else f"{0x9A + night:02x}" * 20,
                "git_branch": "main", "git_dirty": None, "toolchain_versions": {},
            }  # fmt: skip
            for serial, difference in (("R5CX1", 0.1), ("R5CX2", -0.1)):
                value = Measurement(metric="decode_tokens_per_s", value=level + difference)
                run = make_run(
                    status="done",
                    created_at=last - timedelta(days=29 - night),
                    container=base.container.model_copy(update={**model, "precision": "W4A16"}),
                    device=DeviceInfo(serial=serial, soc="SM8750", **phone),
                    workload=WorkloadRecord(
                        runner="genie-t2t-run", prompt_tokens=prompt, max_new_tokens=128
                    ),
                    provenance=base.provenance.model_copy(update=source),
                    measurements=(value,),
                )
                store.write_run(run)
        return [run.id for run in store.list_runs()]


NIGHT = datetime(2026, 11, 20, 22, tzinfo=UTC)


@scene("analysis.md", slow=True)
def results_of_other_tools(reader: Reader) -> None:
    stored_nights(reader.folder / "results.db", datetime.now(UTC))
    for name, source in (("bench.json", "llama-bench.json"), ("qnn-llama-runner.log",) * 2):
        reader.give(name, ROOT / "tests" / "fixtures" / "imports" / source)


@scene("deployment.md")
def a_model_file(reader: Reader) -> None:
    (reader.folder / "out").mkdir()
    (reader.folder / "out" / "model.bin").write_bytes(b"as a model")
    reader.scope["device"] = reader.device()


@scene("devices.md")
@scene("virtual-device.md", slow=True)
def own_adb_server(reader: Reader) -> None:
    """A user without devices, whose adb server qnnfarm has started."""
    short = TemporaryDirectory(prefix="q-")  # paths of sockets are
    reader.patch.setenv("QNNFARM_STATE_DIR", short.name)
    reader.patch.delenv("ADB_SERVER_SOCKET")
    address = own_address()
    ensure_server(address)
    reader.words["/home/me/.local/state/qnnfarm/adb/lab.socket"] = address.path
    reader.words["/home/me/.local/state/qnnfarm"] = short.name

    def end() -> None:
        kill_server(address)
        short.cleanup()

    reader.request.addfinalizer(end)
    reader.removes_alpha()


@scene("dialogs.md", slow=True)
@scene("embeddings.md", slow=True)
@scene("evaluation.md", slow=True)
@scene("quality.md", slow=True)
@scene("graph-runtime.md", slow=True)
def a_container_on_a_device(reader: Reader) -> None:
    reader.installed()
    reader.checkout()
    reader.device()
    reader.bundle("CONTAINER", "containers/SM8750")
    reader.model("CHECKPOINT", "MODEL_DIR")
    reader.text("FILE", "heldout.txt")
    reader.words |= {"127.0.0.1:36111": "virtual:shared"}


@scene("first-hour.md", slow=True)
def a_checkout(reader: Reader) -> None:
    reader.checkout()


@scene("configurations.md")
@scene("genie-configurations.md")
def a_dialog_with_faults(reader: Reader) -> None:
    reader.bundle("container")
    shutil.copy(reader.folder / "container" / "genie_config.json", reader.folder)
    config = json.loads((reader.folder / "genie_config.json").read_text())
    config["dialog"]["engine"]["backend"]["QnnHtp"]["pol"] = True
    reader.write("dialog.json", config)
    reader.statuses["config check"] = {1}


@scene("history.md", slow=True)
def nights_with_a_loss(reader: Reader) -> None:
    stored_nights(reader.folder / "results.db", NIGHT)
    listed = qnnfarm("alerts", "ls", "--json", cwd=reader.folder)
    reader.words["5bd1"] = json.loads(listed.stdout)[0]["id"]


@scene("measurements.md", slow=True)
def nights_of_a_repository(reader: Reader) -> None:
    git = ("git", "-c", "user.name=me", "-c", "user.email=me@example.com")
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "1.2"], ["tag", "v1.2"]):
        subprocess.run([*git, *words], cwd=reader.folder, check=True)
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=reader.folder, check=True, capture_output=True, text=True
    ).stdout.strip()
    stored_nights(reader.folder / "results.db", NIGHT, commit=head, genie="1.21")
    reader.statuses["gate"] = {0, 1}


@scene("report.md", slow=True)
def nights_to_report(reader: Reader) -> None:
    runs = stored_nights(reader.folder / "results.db", NIGHT)
    stored_nights(reader.folder / "results.db", NIGHT, prompt=128)
    reader.words["RUN RUN"] = " ".join(runs[:2])
    reader.words["2026-05-30"] = f"{NIGHT:%Y-%m-%d}"


@scene("lab.md", slow=True)
def a_lab_with_a_worker(reader: Reader) -> None:
    needs("openssl")
    lab = ExitStack()
    reader.request.addfinalizer(lab.close)
    server = lab.enter_context(
        running_postgresql_server(reader.request.getfixturevalue("new_port"))
    )
    server.create("lab")
    reader.patch.setenv("QNNFARM_LAB", server.url("lab"))
    reader.bundle("CONTAINER_DIR")
    reader.model("MODEL")
    reader.write("PLAN.yaml", PLAN | {"db": server.url("lab")})
    reader.pool()
    words = ("worker", "--pool", "pool.yaml", "--builds", ".")
    command = [sys.executable, "-m", "harness.cli", *words]
    worker = lab.enter_context(subprocess.Popen(command, cwd=reader.folder))
    lab.callback(worker.terminate)


@scene("upkeep.md", slow=True)
def nights_to_prune(reader: Reader) -> None:
    stored_nights(reader.folder / "results.db", datetime.now(UTC) - timedelta(days=100))


@scene("pool.md")
def a_pool(reader: Reader) -> None:
    reader.pool(tags=["bench"])


@scene("README.md", slow=True)
def newcomer(reader: Reader) -> None:
    (reader.folder / ".venv").symlink_to(sys.prefix)
    reader.words["python3 -m venv .venv && .venv/bin/pip install -e '.[build]'"] = "true"
    reader.patch.setenv("QNNFARM_CACHE_DIR", str(reader.folder / "cache"))


PLAN = {
    "name": "some",
    "db": "results.db",
    "containers": [{"path": "CONTAINER_DIR"}],
    "workloads": [{"kind": "generate", "prompt": "In the beginning", "max_tokens": 2}],
    "conditions": "none",
}


@scene("builder.md", slow=True)
def models_to_build(reader: Reader) -> None:
    reader.installed()
    reader.model("MODEL", "MODEL_DIR", "model_dir")
    reader.text("FILE")
    needs("plugins.lora", "plugins.speculation")
    reader.give("eaglet", tiny_llama.folder() / "eaglet")
    reader.give("ssd_tensor.safetensors", tiny_llama.folder() / "ssd" / "ssd_tensor.safetensors")
    options = next(block.text for block in blocks("yaml") if block.path.name == "builder.md")
    (reader.folder / "eaglet.yaml").write_text(options)


@scene("gguf.md", slow=True)
def a_gguf(reader: Reader) -> None:
    write_gguf(reader.folder / "model-Q4_K_M.gguf")


@scene("speculation.md", slow=True)
def a_model_and_a_text(reader: Reader) -> None:
    reader.installed()
    reader.model("MODEL_DIR")
    reader.text("FILE")


@scene("nightly.md", slow=True)
def a_plan_with_a_build(reader: Reader) -> None:
    reader.device()
    reader.model("MODEL")
    build = {"model": "MODEL", "target": "SM8750:emulator", "ar": [1, 32], "cl": 192, "splits": 2}
    plan = PLAN | {"containers": [{"path": "CONTAINER_DIR", "build": build}]}
    reader.write("PLAN.yaml", plan | {"nightly": {"reports": "nightly-reports"}})


@scene("aot.md", slow=True)
def a_model(reader: Reader) -> None:
    needs("libatomic1")
    reader.model("MODEL")


@scene("op-packages.md", slow=True)
def a_checkout_with_a_compiler(reader: Reader) -> None:
    needs("gcc", "libatomic1")
    reader.checkout()


@scene("plans.md", slow=True)
def a_plan(reader: Reader) -> None:
    reader.device()
    reader.bundle("CONTAINER_DIR")
    reader.write("PLAN.yaml", PLAN)


@scene("pipeline.md", slow=True)
def a_checkout_and_a_container(reader: Reader) -> None:
    device = reader.device()
    reader.checkout()
    reader.model("path/to/model")
    shape = ("--target", "SM8750:emulator", "--ar", "1,32", "--cl", "192")
    given = (*shape, "--recipe", "w4a16-rtn", "--out", "container")
    built = qnnfarm("build", tiny_llama.folder(), *given, cwd=reader.folder)
    assert built.returncode == 0, built.stderr
    reader.patch.setenv("QNNFARM_CACHE_DIR", str(reader.folder / "cache"))
    reader.words |= {"<serial>@<host>": device.serial}
    reader.request.getfixturevalue("reference_outputs")
    cache: Path = reader.request.getfixturevalue("build_cache") / "tiny_llama"
    reader.scope["entry"] = next(cache.glob("compile_*"))
    for name, ar in (("dlc_of_ar1", 1), ("dlc_of_ar128", 32)):
        reader.scope[name] = next(cache.glob(f"convert_*/ar{ar}_cl192_1_of_2.dlc"))


@scene("pytest.md", slow=True)
def own_tests(reader: Reader) -> None:
    device = reader.device()
    reader.bundle("build/llama")
    reader.pool()
    tests = next(b.text for b in blocks("python") if b.path.name == "pytest.md")
    for word, ours in (("arm64-v8a", "x86_64"), ("prompt_tokens=512", "prompt_tokens=128")):
        tests = tests.replace(word, ours)
    (reader.folder / "test_phone.py").write_text(tests)
    reader.words |= {"127.0.0.1:5555": device.serial, "virtual:one": "virtual:shared"}


@scene("quantization.md", slow=True)
def a_model_to_quantize(reader: Reader) -> None:
    needs("plugins.onnx_exports")
    reader.model("my-model")
    reader.scope["builder"] = GenAIBuilderFactory.create(tiny_llama.folder())


@scene("diagnosis.md", slow=True)
@scene("qairt.md", slow=True)
def a_stand_in_of_the_sdk(reader: Reader) -> None:
    reader.device()
    reader.bundle("containers/SM8750")
    reader.words["SERIAL"] = "virtual:shared"
    from tests.plugins.qairt.qairt_sdk import make_sdk

    reader.patch.setenv("QAIRT_SDK_ROOT", str(make_sdk(reader.folder / "2.39.0.250926")))
    reader.checkout()


@scene("telemetry.md", slow=True)
def a_deployed_container(reader: Reader) -> None:
    device = reader.device()
    bundle = reader.bundle("CONTAINER")
    container = GenAIContainer.load(bundle)
    deployment = deploy(device, {}, run_id="telemetry")
    reader.scope |= {
        "device": device, "container": container, "deployment": deployment,
        "scripts_dir": deployment.scripts_dir,
    }  # fmt: skip


@scene("tracing.md", slow=True)
def containers_and_texts(reader: Reader) -> None:
    reader.device()
    reader.bundle("CONTAINER")
    reader.give("ENCODER", reader.request.getfixturevalue("encoder_bundle"))
    reader.model("MODEL")
    reader.text("heldout.txt")
    (reader.folder / "texts.txt").write_text("In the beginning\nthe heaven and the earth\n")


RUNNABLE = [block for block in blocks("sh", "console", "python") if block.why is None]


def test_every_document_with_commands_has_a_scene() -> None:
    assert {block.path.name for block in RUNNABLE} == SCENES.keys()


@pytest.mark.filterwarnings("ignore:.* was made for:buildlib.errors.ModelWarning")
@pytest.mark.parametrize(("name", "prepare"), SCENES.values())
def test_a_document_runs(
    name: str, prepare: Scene, request: pytest.FixtureRequest, adb_server: object,
    build_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QNNFARM_CACHE_DIR", str(build_cache))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    reader = Reader(request, monkeypatch, tmp_path)
    prepare(reader)
    with Shell(tmp_path, os.environ) as shell:
        printed = ""
        for block in RUNNABLE:
            if block.path.name != name or (block.needs and CONDITIONS[block.needs]()):
                continue
            if block.kind == "python":
                code = compile(reader.as_printed(block.text), str(block), "exec")
                exec(code, reader.scope)  # noqa: S102
            for command in commands(block):
                if command.text:
                    line = reader.as_printed(command.text)
                    status, printed = shell.run(line)
                    wanted = next((s for c, s in reader.statuses.items() if c in line), {0})
                    assert status in wanted, f"{block}: `{line}` ended with {status}: {printed}"
                    if line.startswith("qnnfarm device start"):
                        named = command.shown.splitlines()[-1] if command.shown else "SERIAL"
                        reader.words[named] = printed.splitlines()[-1]
                if command.shown is not None:
                    found = difference(reader.as_printed(command.shown), printed)
                    assert not found, f"{block}: {found}"


def read_options(text: str) -> None:
    shutil.copytree(tiny_llama.folder() / "eaglet", "eaglet")
    shutil.copytree(EXPORT, "export")
    shutil.copy("export/model.onnx", "decode.onnx")
    builder = GenAIBuilderFactory.create(tiny_llama.folder())
    apply_options(builder, flatten_options(yaml.safe_load(text), Path.cwd()))


def read_recipe(text: str) -> None:
    needs("plugins.pipeline")
    from plugins.pipeline.recipe import LLMPipelineConfig

    stages = {"model_loader": {}, **yaml.safe_load(text)}
    LLMPipelineConfig.of({"model_id_or_path": "my-model", "stages": stages})


def read_plan(text: str) -> None:
    if "containers:" not in text:
        text = f"name: some\ncontainers: [{{path: container}}]\n{text}"
    Path("plan.yaml").write_text(text)
    load_plan(Path("plan.yaml"))


def read_pool(text: str) -> None:
    Path("pool.yaml").write_text(text)
    load_config(Path("pool.yaml"))


def read_model_of_a_program(text: str) -> None:
    from plugins.other_runtimes.llama_cpp.runtime import LlamaCppDescription

    Path("llama.yaml").write_text(text)
    read_description(Path("llama.yaml"), LlamaCppDescription, "llama.cpp")


READERS = {
    "builder.md": read_options,
    "op-packages.md": read_options,
    "quantization.md": read_recipe,
    "plans.md": read_plan,
    "dialogs.md": read_plan,
    "pool.md": read_pool,
    "other-runtimes.md": read_model_of_a_program,
}
ELSEWHERE = {"lab.md", "nightly.md"}  # Prometheus; tests/plugins/nightly/test_recipes.py


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_yaml_is_read_by_what_reads_such_files(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if block.path.name in ELSEWHERE:
        assert yaml.safe_load(block.text)
        return
    READERS[block.path.name](block.text)


def test_json_is_read() -> None:
    for block in blocks("json"):
        assert json.loads(block.text), block
