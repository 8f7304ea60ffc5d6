"""Builds mutated models: `python -m tests.fuzz.worker WORK SEED COMPILE_EVERY [CASE...]`.

Without cases, it takes them from its input, a line each. It prints a verdict on each as JSON.
"""

import json
import math
import re
import resource
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnx

from buildlib.builder.build import BuildOutputs
from buildlib.builder.canonical import find_export_reader
from buildlib.cache.layout import SIDECAR
from buildlib.checkpoint.config import load_config
from buildlib.container.container import GenAIContainer
from buildlib.errors import BuildError, InvalidOptionError, ModelWarning, ToolchainError
from buildlib.genai import GenAIBuilderFactory
from buildlib.graph.files import load_model, save_model, tensor_array
from buildlib.graph.interface import ATTENTION_MASK
from buildlib.graph.shape import GraphShape
from buildlib.graph.values import static_shape
from buildlib.numerics.comparison import SAME_FLOAT, SideComparison
from buildlib.numerics.runners import OnnxRunner, PartRunner
from buildlib.numerics.verifier import StageModels, VerifyOptions, Version, verify_outputs
from buildlib.targets import Target
from buildlib.toolchains.base import BinaryInfo, GraphPorts, OpPackageLibrary, Toolchain
from buildlib.toolchains.compile_config import CompileConfig
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain
from tests.buildlib.families import BAICHUAN, write_checkpoint
from tests.buildlib.model_folders import export_checkpoint
from tests.fuzz.mutations import Mutation, draw

_SHAPE = GraphShape(8, 32)
_BUILD: dict[str, object] = {
    "arn_cl_options.auto_regression_number": (1, 8),
    "arn_cl_options.context_length": (32,),
    "split_model.num_splits": 2,
}
_CONFIG = BAICHUAN | {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 2,
}  # fmt: skip
_MEMORY_BYTES = 8 << 30
"""Of addresses: a file that makes its reader take more is a fault."""
_TARGET = "SM8750:emulator"
_OPTIONS = VerifyOptions(max_positions=14, continuation=2, n_threads=1)
_LONGEST_MESSAGE = 1500
_COMPILED_DB = 15.0
_OF_NO_FILE = (ToolchainError, InvalidOptionError)
_OF_A_STAGE = re.compile(r": pass [\w ]+, (pre|post)condition: |^invalid shape ")
_OF_THE_CACHE = frozenset({".files.json", ".last_used"})


@dataclass(frozen=True)
class Verdict:
    """Outcome of one case.

    Attributes:
        did: mutations of the model.
        outcome: `refused` with a message; `built`, or `compiled` when the compiler ran as well.
        fault: why that is wrong, or empty.
        seconds: duration.
    """

    case: int
    did: tuple[str, ...]
    outcome: str
    message: str
    fault: str
    seconds: float


@dataclass(frozen=True)
class Expected:
    """Outcomes that a case may have, and whether it is compiled."""

    must_fail: bool
    odd_weights: bool
    compiles: bool


class CheckingToolchain:
    """`Toolchain` that takes what the CPU can run, and writes binaries that hold nothing."""

    @property
    def name(self) -> str:
        return "none"

    def versions(self) -> Mapping[str, str]:
        return {"toolchain": self.name}

    def check(self, config: CompileConfig) -> None:
        """Nothing is compiled, so that every option will do."""

    def convert(self, onnx: Path, dlc: Path, target: Target) -> None:
        try:
            OnnxRunner(onnx, n_threads=1).close()
        except BuildError as error:
            reason = str(error).replace(str(onnx), onnx.name)
            raise ToolchainError("convert", onnx.name, reason, 1, (), "") from error
        dlc.write_text(str(target))

    def op_package(self, package: OpPackageLibrary) -> tuple[str, ...]:
        raise ToolchainError("op_package", str(package.library), "none here", 1, (), "")

    def compile(
        self,
        dlcs: Sequence[Path],
        binary: Path,
        config: CompileConfig,
        op_packages: Sequence[OpPackageLibrary] = (),  # noqa: ARG002
        ports: Mapping[str, GraphPorts] | None = None,  # noqa: ARG002
    ) -> BinaryInfo:
        binary.write_text(f"{len(dlcs)} graphs for {config.target}")
        return self.inspect(binary)

    def inspect(self, binary: Path) -> BinaryInfo:
        return BinaryInfo((), 0, "", "", "", "", "", binary.stat().st_size)


def run_case(base: Path, work: Path, seed: int, case: int, compile_every: int) -> Verdict:
    """Mutate a copy of `base` below `work`, build it, and check how it ended."""
    began = time.monotonic()
    rng = np.random.default_rng([seed, case])
    shutil.rmtree(work, ignore_errors=True)
    folder = work / "model"
    shutil.copytree(base, folder)
    mutations: list[Mutation] = []
    did: list[str] = []
    for _ in range(int(rng.choice([1, 2, 3], p=[0.8, 0.15, 0.05]))):
        drawn = draw(rng)
        try:
            did.append(drawn.apply(rng, folder))
        except Exception:  # noqa: BLE001, S112  (an earlier mutation has left nothing to change)
            continue
        mutations.append(drawn)
        if not all(path.is_file() for path in folder.iterdir()):
            break  # what reads a pipe or a device does not come back
    must_fail = len(mutations) == 1 and mutations[0].must_fail
    compiles = bool(rng.integers(compile_every) == 0)
    expected = Expected(must_fail, any(one.odd_weights for one in mutations), compiles)
    outcome, message, fault = _build_and_check(folder, work / "cache", expected)
    seconds = round(time.monotonic() - began, 2)
    return Verdict(case, tuple(did), outcome, message, fault, seconds)


def _build_and_check(folder: Path, cache: Path, expected: Expected) -> tuple[str, str, str]:
    before = _listing(folder)
    try:
        outcome, message, fault = _build(folder, cache, expected)
    except Exception as error:  # noqa: BLE001  (that is what is looked for)
        where = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in where if "buildlib" in frame.filename] or list(where)
        place = f"{ours[-1].filename}:{ours[-1].lineno}"
        return "raised", "", f"{type(error).__name__} at {place}: {str(error)[:300]}"
    if not fault and _listing(folder) != before:
        fault = "the model's folder was changed"
    return outcome, message, fault or _leftovers(cache)


def _build(folder: Path, cache: Path, expected: Expected) -> tuple[str, str, str]:
    try:
        _outputs(folder, cache, CheckingToolchain())
    except BuildError as error:
        return "refused", str(error), _message_fault(error, folder, cache)
    if expected.must_fail:
        return "built", "", "this must not build"
    if not expected.compiles:
        return "built", "", _model_fault(folder, cache, None, expected)
    try:
        outputs = _outputs(folder, cache, OrtQnnToolchain())
    except BuildError as error:
        return "refused", str(error), _message_fault(error, folder, cache)
    return "compiled", "", _model_fault(folder, cache, outputs, expected)


def _outputs(folder: Path, cache: Path, toolchain: Toolchain) -> BuildOutputs:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* (no known family|was made for)", ModelWarning)
        builder = GenAIBuilderFactory.create(folder, cache_root=cache, toolchain=toolchain)
        plan = builder.set_targets([_TARGET]).set_transformation_options(_BUILD).plan()
    return plan.outputs()


def _message_fault(error: BuildError, folder: Path, cache: Path) -> str:
    message = str(error)
    if f"{cache}/model/." in message:
        return "the message names a file that is gone"
    names_none = isinstance(error, _OF_NO_FILE) or _OF_A_STAGE.search(message)
    if str(folder) not in message and not names_none:
        return "the message names no file of the user's"
    if "\n" in message or "\r" in message:
        return "the message has several lines"
    if len(message) > _LONGEST_MESSAGE:
        return f"the message has {len(message)} characters"
    return "" if message.strip() else "the message is empty"


def _model_fault(
    folder: Path, cache: Path, outputs: BuildOutputs | None, expected: Expected
) -> str:
    """Does what was built compute what the user's file computes?"""
    found = _stage_files(cache)
    shapes = sorted(found["model"])
    own = _runnable(folder / "model.onnx", cache / "source")
    config = load_config(folder / "config.json")
    opener: Callable[[], PartRunner] = partial(OnnxRunner, own, n_threads=1, plain=True)
    if any(static_shape(value) is None for value in load_model(own).graph.inputs):
        reader, own = find_export_reader(own), found["model"][_SHAPE][0]
        opener = partial(reader.open_export, own, config, _SHAPE)
    models = StageModels(
        config=config,
        imported=dict.fromkeys(shapes, own),
        arcl={shape: found["model"][shape][0] for shape in shapes},
        qdq=found["qdq"],
        binaries=outputs.binaries if outputs else None,
        earlier={own: [Version("import", SAME_FLOAT, opener)]},
    )
    try:
        if outputs is not None:
            GenAIContainer.load(outputs.container)
        emulator = OrtQnnToolchain() if outputs else None
        report = verify_outputs(models, emulator=emulator, options=_OPTIONS)
    except BuildError as error:
        return f"built, but it cannot be run: {error}"
    faults = [one for one in report.rows if not _good(one, odd=expected.odd_weights)]
    if not faults:
        return ""
    if "not finite" in report.rows[0].note and _weights_are_finite(own):
        return ""  # the user's own model overflows
    return f"built, but {faults[0]}"


def _runnable(path: Path, folder: Path) -> Path:
    """The user's file, or where ONNX Runtime refuses it, what onnx_ir made of it."""
    try:
        OnnxRunner(path, n_threads=1, plain=True).close()
    except BuildError:
        return save_model(load_model(path), folder / path.name)
    return path


def _weights_are_finite(path: Path) -> bool:
    tensors = (value.const_value for value in load_model(path).graph.initializers.values())
    arrays = (tensor_array(tensor) for tensor in tensors if tensor is not None)
    return all(np.isfinite(array).all() for array in arrays if array.dtype.kind == "f")


def _good(one: SideComparison, *, odd: bool) -> bool:
    match one.side:
        case "compile":
            return odd or one.found.sqnr_db >= _COMPILED_DB
        case "arcl" if odd:
            return one.passed or math.isfinite(one.found.relative)
        case _:
            return one.passed


def _stage_files(cache: Path) -> dict[str, dict[GraphShape, list[Path]]]:
    """Whole models and quantized parts, as the cache has them; of parts made twice either one."""
    found: dict[str, dict[GraphShape, dict[str, Path]]] = {"model": {}, "qdq": {}}
    for path in sorted(cache.rglob("*.onnx")):
        kind = "qdq" if path.name.endswith(".qdq.onnx") else path.stem
        stage = path.parent.name.partition("_")[0]
        if kind == "qdq" or (kind == "model" and stage == "arcl"):
            shape = _shape_of(path)
            found[kind].setdefault(shape, {})[path.name] = path
    return {
        kind: {shape: [paths[name] for name in sorted(paths)] for shape, paths in shapes.items()}
        for kind, shapes in found.items()
    }


def _shape_of(path: Path) -> GraphShape:
    """From the proto: onnx_ir takes 30 times as long."""
    inputs = onnx.load(path, load_external_data=False).graph.input
    mask = next(value for value in inputs if value.name == ATTENTION_MASK)
    dims = mask.type.tensor_type.shape.dim
    return GraphShape(dims[2].dim_value, dims[3].dim_value)


def _listing(folder: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        found[str(path)] = (status.st_size, status.st_mtime_ns)
    return found


def _leftovers(cache: Path) -> str:
    """Return leftovers of a build: unfinished entries and temporary files."""
    for entry in cache.glob("model/*"):
        if entry.is_dir() and not (entry / SIDECAR).is_file():
            return f"{entry.name} is left in the cache, unfinished"
        for path in entry.rglob("*"):
            if path.name.startswith(".") and path.name not in _OF_THE_CACHE:
                return f"{path.relative_to(cache)} is left in the cache"
    return ""


def write_model(folder: Path) -> None:
    """Write the sound model that all mutations start from, small enough for thousands of builds."""
    checkpoint = write_checkpoint(folder.with_name("checkpoint"), _CONFIG)
    text = "".join(chr(0x102 + n * n % 62) for n in range(200))
    export_checkpoint(checkpoint, text, folder, _SHAPE, n_windows=4)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    work, seed, every = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    base = work / "base"
    if not base.exists():
        write_model(base)
    for case in map(int, sys.argv[4:] or sys.stdin):
        verdict = run_case(base, work / "case", seed, case, every)
        sys.stdout.write(json.dumps(asdict(verdict)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
