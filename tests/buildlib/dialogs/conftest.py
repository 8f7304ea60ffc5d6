"""Dialogs of the real Genie on the emulator, with the trained model built in one part."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import device_scripts
from buildlib.builder.stages.export import export_checkpoint
from buildlib.builder.stages.package import genie_config
from buildlib.checkpoint.config import load_config
from buildlib.container.genie_config import GenieConfig
from buildlib.container.htp_config import htp_config
from buildlib.encodings.files import load_encodings
from buildlib.graph.shape import GraphShape
from buildlib.passes.arcl import convert_arcl
from buildlib.quantize.qdq import apply_encodings
from buildlib.targets import parse_target
from buildlib.toolchains.compile_config import CompileConfig
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain
from buildlib.toolchains.ort_qnn.wheel import find_libraries
from tests.conftest import made_once
from tests.system import needs

ANSWER = "answer.txt"


@dataclass(frozen=True)
class GenieLab:
    """The trained model under the real Genie on the emulator, one binary, AR 1 and 32 at CL 192."""

    export: Path
    prompt: str = "In the beginning God created the heaven and the earth. And God said,"
    n_tokens: int = 8

    def compile(self, model: Path, folder: Path) -> GenieConfig:
        """Compile a float model into `folder` as it is; the configuration of a plain dialog."""
        toolchain, target = OrtQnnToolchain(), parse_target("SM8750:emulator")
        dlcs = []
        for shape in (GraphShape(1, 192), GraphShape(32, 192)):
            part = convert_arcl(model, shape, folder / f"{shape}.onnx")
            encodings = load_encodings(part.with_suffix(".encodings"))
            qdq = apply_encodings(part, encodings, folder / f"{shape}.qdq.onnx")
            dlcs.append(folder / f"{shape}.dlc")
            toolchain.convert(qdq, dlcs[-1], target)
        toolchain.compile(dlcs, folder / "model.bin", CompileConfig.for_target(target))
        (folder / "htp_backend_ext_config.json").write_text(htp_config(target).to_json())
        (folder / "tokenizer.json").write_bytes((self.export / "tokenizer.json").read_bytes())
        config = genie_config(load_config(self.export / "config.json"), 192, ["model.bin"], target)
        return config.with_dialog(max_num_tokens=self.n_tokens)

    def ask(self, folder: Path, config: GenieConfig, *arguments: str) -> str:
        """What Genie answers to the prompt."""
        with self._started(folder, config, *arguments) as process:
            said, _ = process.communicate(timeout=300)
        assert process.returncode == 0, said
        return said.partition("[BEGIN]: ")[2].rpartition("[END]")[0]

    def _started(
        self, folder: Path, config: GenieConfig, *arguments: str
    ) -> "subprocess.Popen[str]":
        (folder / "genie_config.json").write_text(config.to_json())
        script = Path(device_scripts.__file__).parent / "genie_t2t_run.py"
        command = [sys.executable, str(script), "-c", "genie_config.json", "-p", self.prompt]
        return subprocess.Popen(
            [*command, *arguments],
            cwd=folder,
            env={"LD_LIBRARY_PATH": find_libraries().search_path, "PATH": os.environ["PATH"]},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@pytest.fixture(scope="session")
def genie_lab(trained: Path, build_cache: Path) -> GenieLab:
    """The trained model, exported."""
    needs("libatomic1")

    def export(folder: Path) -> None:
        text = (trained / "text" / "calibration.txt").read_text()
        export_checkpoint(trained, text, folder, GraphShape(32, 192))

    return GenieLab(made_once(build_cache.with_name("genie-lab"), export))


@pytest.fixture(scope="session")
def plain_dialog(
    genie_lab: GenieLab, build_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, GenieConfig]:
    """The trained model as it is, compiled: a folder of its worker, and its configuration."""

    def build(folder: Path) -> None:
        folder.mkdir()
        config = genie_lab.compile(genie_lab.export / "model.onnx", folder)
        (folder / ANSWER).write_text(genie_lab.ask(folder, config))

    built = made_once(build_cache.with_name("plain-dialog"), build)
    folder = tmp_path_factory.mktemp("plain")
    skip = shutil.ignore_patterns("*.onnx", "*.dlc", "*.safetensors", "*.encodings")
    shutil.copytree(built, folder, ignore=skip, dirs_exist_ok=True)
    config = GenieConfig.model_validate_json((folder / "genie_config.json").read_text())
    return folder, config


@pytest.fixture(scope="session")
def plain_answer(plain_dialog: tuple[Path, GenieConfig]) -> str:
    """What Genie answers in the plain dialog."""
    return (plain_dialog[0] / ANSWER).read_text()
