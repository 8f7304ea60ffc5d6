"""A model under the real Genie on the emulator."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import device_scripts
from buildlib.builder.stages.package import genie_config
from buildlib.checkpoint.config import load_config
from buildlib.container.genie_config import GenieConfig
from buildlib.container.writer import htp_config
from buildlib.encodings.files import load_encodings
from buildlib.graph.shape import GraphShape
from buildlib.passes.arcl import convert_arcl
from buildlib.quantize.qdq import apply_encodings
from buildlib.targets import parse_target
from buildlib.toolchains.compile_config import CompileConfig
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain
from buildlib.toolchains.ort_qnn.wheel import find_libraries

RUNNER = Path(device_scripts.__file__).parent / "genie_t2t_run.py"
SHAPES = GraphShape(1, 96), GraphShape(16, 96)


def run_genie(folder: Path, script: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a script that loads the Genie of the wheel, in a folder."""
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        cwd=folder,
        env={"LD_LIBRARY_PATH": find_libraries().search_path, "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def ask(folder: Path, *arguments: str) -> str:
    """What Genie answers to the options of its runner."""
    done = run_genie(folder, RUNNER, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.partition("[BEGIN]: ")[2].rpartition("[END]")[0]


@dataclass(frozen=True)
class GenieLab:
    """A model under the real Genie on the emulator, one binary, AR 1 and 16 at CL 96."""

    export: Path
    prompt: str
    n_tokens: int = 8

    def compile(self, model: Path, folder: Path) -> GenieConfig:
        """Compile a float model into `folder` as it is; the configuration of a plain dialog."""
        toolchain, target = OrtQnnToolchain(), parse_target("SM8750:emulator")
        dlcs = []
        for shape in SHAPES:
            part = convert_arcl(model, shape, folder / f"{shape}.onnx")
            encodings = load_encodings(part.with_suffix(".encodings"))
            qdq = apply_encodings(part, encodings, folder / f"{shape}.qdq.onnx")
            dlcs.append(folder / f"{shape}.dlc")
            toolchain.convert(qdq, dlcs[-1], target)
        toolchain.compile(dlcs, folder / "model.bin", CompileConfig.for_target(target))
        (folder / "htp_backend_ext_config.json").write_text(htp_config(target).to_json())
        (folder / "tokenizer.json").write_bytes((self.export / "tokenizer.json").read_bytes())
        config = load_config(self.export / "config.json")
        dialog = genie_config(config, SHAPES[0].cl, ["model.bin"], target)
        return dialog.with_dialog(max_num_tokens=self.n_tokens)

    def ask(self, folder: Path, config: GenieConfig, *arguments: str) -> str:
        """What Genie answers to the prompt."""
        (folder / "genie_config.json").write_text(config.to_json())
        return ask(folder, "-c", "genie_config.json", "-p", self.prompt, *arguments)
