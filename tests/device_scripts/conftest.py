"""A device's shell and tools, as bare as a phone's, and the runners of device_scripts."""

import json
import os
import resource
import secrets
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import onnxruntime_qnn
import pytest

import device_scripts
from tests.system import program

SCRIPTS = Path(device_scripts.__file__).parent
# The runners import each other as files beside them, as they do on a device.
sys.path.insert(0, str(SCRIPTS))


@dataclass(frozen=True)
class DeviceShell:
    """One shell with toybox as its only tools, and a work root."""

    shell: str
    environment: dict[str, str]
    work_root: Path

    def command(self, script: str, *arguments: str | Path) -> list[str]:
        return [self.shell, str(SCRIPTS / script), *map(str, arguments)]

    def run(
        self, script: str, *arguments: str | Path, stdin: str = "", timeout_s: float = 250
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(script, *arguments),
            input=stdin,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def start(self, script: str, *arguments: str | Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(script, *arguments),
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run_on_a_full_disk(
        self, script: str, *arguments: str | Path
    ) -> subprocess.CompletedProcess[str]:
        """Run it where writing to files fails, and nobody is killed for it."""
        return subprocess.run(
            self.command(script, *arguments),
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            restore_signals=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
        )

    def with_tool(self, name: str, script: str) -> Self:
        """With one tool of another kind; `real` in its script becomes the one that is here."""
        here = Path(self.environment["PATH"])
        tools = self.work_root.parent / f"tools {secrets.token_hex(4)}"
        shutil.copytree(here, tools, symlinks=True)
        tool = tools / name
        tool.unlink(missing_ok=True)
        real = f'real() {{ exec "{(here / "cat").resolve()}" {name} "$@"; }}'
        tool.write_text(f"#!{self.shell}\n{real}\n{script}\n")
        tool.chmod(0o755)
        return replace(self, environment={**self.environment, "PATH": str(tools)})

    def without_tool(self, name: str) -> Self:
        """With a tool less."""
        device = self.with_tool(name, "")
        (Path(device.environment["PATH"]) / name).unlink()
        return device

    def make_run(self, name: str = "run1") -> Path:
        folder = self.work_root / "runs" / name
        folder.mkdir()
        return folder


def processes_with(mark: bytes) -> list[int]:
    """The processes whose environment holds a mark."""
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (folder / "environ").read_bytes():
                processes.append(int(folder.name))
    return processes


def marked_processes(run_dir: Path) -> list[int]:
    """The processes of a run."""
    return processes_with(b"run:" + (run_dir / ".qnnfarm" / "marker").read_bytes().strip())


@pytest.fixture(scope="session", params=["mksh", pytest.param("dash", marks=pytest.mark.variant)])
def bare_path(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """A shell, and a folder that holds links to toybox for each of its tools, and `sh`."""
    shell, toybox = program(request.param), program("toybox")
    folder = tmp_path_factory.mktemp(f"bin-{request.param}")
    for tool in subprocess.run([toybox], capture_output=True, text=True, check=True).stdout.split():
        (folder / tool).symlink_to(toybox)
    (folder / "sh").symlink_to(shell)
    return str(shell), folder


@pytest.fixture
def device(bare_path: tuple[str, Path], tmp_path: Path) -> DeviceShell:
    shell, tools = bare_path
    root = tmp_path / "work root"
    for folder in ("store", "runs", "incoming"):
        (root / folder).mkdir(parents=True)
    return DeviceShell(shell, {"PATH": str(tools)}, root)


@dataclass(frozen=True)
class Runner:
    """Starts a Python runner as a device would: libGenie by LD_LIBRARY_PATH alone."""

    environment: dict[str, str]

    def command(self, script: str, arguments: Sequence[str | Path]) -> list[str]:
        return [sys.executable, str(SCRIPTS / script), *map(str, arguments)]

    def run(
        self, script: str, *arguments: str | Path, cwd: Path, timeout_s: float = 250
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(script, arguments),
            cwd=cwd,
            env=self.environment,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            timeout=timeout_s,
            check=False,
        )


@pytest.fixture(scope="session")
def runner() -> Runner:
    libraries = str(Path(onnxruntime_qnn.__file__).parent)
    return Runner({"LD_LIBRARY_PATH": libraries, "PATH": os.environ["PATH"]})


def shortened(bundle: Path, tmp_path: Path, most: int) -> Path:
    """A bundle of the same files, except that its answers have so many tokens at most."""
    folder = tmp_path / "bundle"
    folder.mkdir()
    for file in bundle.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    config = json.loads((bundle / "genie_config.json").read_text())
    config["dialog"]["max-num-tokens"] = most
    (folder / "genie_config.json").unlink()
    (folder / "genie_config.json").write_text(json.dumps(config))
    return folder


def last_query(profile: Path) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(profile.read_text())["components"][0]["events"][-1]
    assert event["type"].endswith("_query")
    return event
