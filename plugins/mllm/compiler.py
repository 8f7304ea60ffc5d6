"""mllm's own compilers of contexts, which the user has built: `mllm-*-aot-sha-c`, in a child.

Their options are those of `examples/*_qnn_aot/compile_sha.cpp` of
https://github.com/UbiquitousLearning/mllm (MIT) at b9c3070; `-o` is required.
"""

import os
import shutil
import tempfile
from pathlib import Path

from buildlib.errors import InvalidOptionError, ToolchainError, ToolchainMissingError
from buildlib.files import atomic_path
from buildlib.toolchains.child_process import Program, run_program
from plugins.mllm.config import AotConfig, Family, ModelConfig, fixed_by_mllm

_TIMEOUT_S = 4 * 3600.0
_GARBAGE = ("block size", "head", "biases")
"""Subjects of remarks after which the context answers nonsense, or none is written."""


def find_compiler(family: Family, build: Path | None) -> Path:
    """Find the compiler of a family: in a build's `bin`, or on the path."""
    names = {"qwen3": ("mllm-qwen3-aot-sha-c", "mllm-qwen3-aot-c")}.get(
        family, (f"mllm-{family}-aot-c-sha", f"mllm-{family}-aot-c")
    )
    for name in names:
        if build is None:
            path = shutil.which(name)
        else:
            places = (build / "bin" / name, build / name)
            path = next((str(place) for place in places if place.is_file()), None)
        if path is not None:
            return Path(path).absolute()
    where = f"{build} has" if build else "the path has"
    raise ToolchainMissingError(
        names[0],
        f"{where} no {names[0]}: build it in mllm's checkout by `python task.py "
        "tasks/build_x86_qnn_aot.yaml`, and name the folder build-qnn-aot",
    )


def check_compilable(model: ModelConfig, aot: AotConfig) -> None:
    """Refuse a model that mllm's compiler would turn into garbage."""
    for remark in fixed_by_mllm(model, aot):
        if remark.startswith(_GARBAGE):
            raise InvalidOptionError("toolchain", f"mllm cannot compile this; {remark}", ())


def compile_context(
    compiler: Path, parameters: Path, config: Path, aot_config: Path, out: Path, qnn: Path | None
) -> None:
    """Compile a `.mllm` file to a context binary.

    Args:
        compiler: of the family.
        parameters: the file.
        config: `config_X.json`.
        aot_config: `qnn_aot_cfg_X.json`.
        out: the binary, which appears whole or not at all.
        qnn: folder of QNN's libraries for this host; by default the compiler's own.
    """
    with (
        tempfile.TemporaryDirectory(prefix="qnnfarm-mllm-") as scratch,
        atomic_path(out.absolute()) as unfinished,
    ):
        arguments = [str(compiler), "-m", str(parameters.absolute())]
        arguments += ["-c", str(config.absolute()), "--aot_config", str(aot_config.absolute())]
        # It joins this and the names of libraries without a slash.
        arguments += [] if qnn is None else ["--qnn_env_path", f"{qnn.absolute()}/"]
        arguments += ["-o", str(unfinished)]
        program = Program(arguments, "mllm", parameters, _TIMEOUT_S, os.environ, Path(scratch))
        log = run_program(program)
        if not unfinished.is_file() or not unfinished.stat().st_size:
            reason = "it ended without a context binary"
            raise ToolchainError("mllm", parameters.name, reason, 0, tuple(arguments), str(log))
        log.unlink()
