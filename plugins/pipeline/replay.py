"""Stages of the cache, run again as they were or with other options.

    convert(load(part), config=sidecar["config"]).save("part.dlc")

    sidecar = json.loads((entry / "builder_cache_info.json").read_text())
    config = CompileConfig.model_validate(sidecar["config"])
    compile(load(dlc), config).save("model.bin")

Names: `qairt.load`, `.arcl`, `.transform`, `.convert`, `.compile`, docs.qualcomm.com 80-87189-2.
"""

import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from buildlib.builder.options import MhaConfig, SplitModelConfig
from buildlib.builder.parts import Part
from buildlib.builder.stage import CachedStage
from buildlib.builder.stages.arcl import ConvertShape
from buildlib.builder.stages.convert import Convert
from buildlib.builder.stages.transform import Transform
from buildlib.cache.layout import (
    FILES,
    LAST_USED,
    SIDECAR,
    CacheEntry,
)
from buildlib.cache.records import read_files, read_info
from buildlib.container.dlc import is_dlc
from buildlib.errors import CacheError, InputFileError
from buildlib.files import atomic_path, scratch_folder
from buildlib.graph.shape import GraphShape
from buildlib.paths import user_path
from buildlib.quantize.options import QuantizationOptions
from buildlib.replay import entry_beside
from buildlib.targets import parse_target
from buildlib.toolchains.base import BinaryInfo, GraphPorts, Toolchain
from buildlib.toolchains.compile_config import CompileConfig
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain
from buildlib.toolchains.registry import toolchain_of

_SUBJECT = re.compile(r"ar(\d+)_cl(\d+)(?:_(\d+)_of_(\d+))?$")


class _Scratch:
    """A temporary folder that goes with this object."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="qnnfarm-replay-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


@dataclass(frozen=True)
class StageModel:
    """Output of a stage: DLCs that make one context binary, or ONNX with weights and encodings."""

    paths: tuple[Path, ...]
    _scratch: _Scratch | None = field(default=None, repr=False, compare=False)

    @property
    def graph_names(self) -> tuple[str, ...]:
        """Names that the graphs have in a binary."""
        return tuple(path.stem for path in self.paths)

    def save(self, dest: str | os.PathLike[str], *, exist_ok: bool = False) -> Path:
        """Copy the first DLC to a file or into a folder; of ONNX the whole folder to a new one.

        Raises:
            InputFileError: there is such a file or folder already.
            OSError: it cannot be written.
        """
        if self.paths[0].suffix == ".dlc":
            return _copy(self.paths[0], dest, exist_ok=exist_ok)
        path, records = user_path(dest), shutil.ignore_patterns(SIDECAR, FILES, LAST_USED)
        if path.exists():
            raise InputFileError(str(path), "it exists already; name a new folder")
        with scratch_folder(path) as scratch:
            shutil.copytree(self.paths[0].parent, scratch, ignore=records, dirs_exist_ok=True)
            scratch.rename(path)
        return path


class CompiledModel:
    """A context binary in a temporary folder, which goes with this object; save it to keep it."""

    def __init__(
        self,
        path: Path,
        config: CompileConfig,
        toolchain: Toolchain,
        scratch: _Scratch | None = None,
    ) -> None:
        self.path = path
        self.config = config
        self._toolchain = toolchain
        self._scratch = scratch

    def inspect(self) -> BinaryInfo:
        """Describe the binary."""
        return self._toolchain.inspect(self.path)

    def save(self, dest: str | os.PathLike[str], *, exist_ok: bool = False) -> Path:
        """Copy the binary atomically to a file, or under its own name into a folder.

        Raises:
            InputFileError: there is such a file already.
            OSError: it cannot be written.
        """
        return _copy(self.path, dest, exist_ok=exist_ok)


def _copy(source: Path, dest: str | os.PathLike[str], *, exist_ok: bool) -> Path:
    path = user_path(dest)
    if path.is_dir():
        path /= source.name
    if (path.exists() or path.is_symlink()) and not exist_ok:
        raise InputFileError(str(path), "it exists already; save with exist_ok=True or elsewhere")
    with atomic_path(path) as unfinished:
        shutil.copyfile(source, unfinished)
    return path


def load(path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> StageModel:
    """Load a DLC, the DLCs of one part at its ARs in the order of the build, or an ONNX model."""
    paths = tuple(map(user_path, [path] if isinstance(path, str | os.PathLike) else path))
    if not paths:
        raise InputFileError("", "no DLC is named")
    for one in paths:
        if not one.is_file():
            raise InputFileError(str(one), "there is no such file")
        if one.suffix == ".onnx" and len(paths) == 1:
            return StageModel(paths)
        if not is_dlc(one):
            raise InputFileError(str(one), "it is no DLC: it holds no model")
    names = [one.stem for one in paths]
    for one in paths:
        if names.count(one.stem) > 1:
            raise InputFileError(str(one), "another DLC has its name, which is that of its graph")
    return StageModel(paths)


def arcl(model: StageModel, config: Mapping[str, Any]) -> StageModel:
    """Run the stage again on the `model.onnx` of the entry that it reads.

    Args:
        config: as in a sidecar of the stage: `ar`, `cl`.

    Raises:
        CacheError: that is no file of an entry.
    """
    shape = GraphShape(int(config["ar"]), int(config["cl"]))
    return _run(ConvertShape(_entry_of(model, "import"), shape))


def transform(model: StageModel, config: Mapping[str, Any]) -> StageModel:
    """Run the stage again on the `model.onnx` of an entry of `arcl`; see there."""
    entry = _entry_of(model, "arcl")
    shape, _ = _subject(entry.folder, read_files(entry.folder).subject)
    options = SplitModelConfig.model_validate(config["split_model"])
    mha = MhaConfig.model_validate(config["mha2sha"])
    return _run(Transform(entry, shape, options.num_splits or 1, options, mha))


def convert(model: StageModel, config: Mapping[str, Any]) -> StageModel:
    """Run the stage again on a part in an entry of `transform`; see `arcl`.

    The weights are those that this part has been converted with before.
    """
    entry, subject = _entry_of(model, "transform"), model.paths[0].stem
    shape, part = _subject(entry.folder, subject)
    before = (read_files(each) for each in entry.folder.parent.glob("convert_*"))
    same = (each for each in before if (each.subject, each.sources[0]) == (subject, entry.hash))
    if (found := next(same, None)) is None:
        reason = f"{subject} was never converted: its weights are unknown"
        raise CacheError(str(entry.folder), reason)
    weights, target = entry_beside(entry.folder, found.sources[1]), parse_target(config["target"])
    toolchain, bits = toolchain_of(found.versions), QuantizationOptions()
    return _run(Convert(entry, weights, shape, part, target, toolchain, bits), "*.dlc")


def _entry_of(model: StageModel, operation: str) -> CacheEntry:
    folder = model.paths[0].absolute().parent
    return CacheEntry(operation, folder, read_info(folder).hash, reused=True)


def _subject(folder: Path, subject: str) -> tuple[GraphShape, Part]:
    match = _SUBJECT.match(subject)
    if match is None:
        raise CacheError(str(folder), f"{subject!r} names no graph, such as ar1_cl4096")
    ar, cl, number, count = (int(text or 1) for text in match.groups())
    return GraphShape(ar, cl), Part(number, count)


def _run(stage: CachedStage, made: str = "*.onnx") -> StageModel:
    scratch = _Scratch()
    stage.run(scratch.path)
    return StageModel(tuple(sorted(scratch.path.glob(made))), scratch)


def compile(  # noqa: A001 - the vendor's name
    model: StageModel | Sequence[StageModel],
    config: CompileConfig,
    *,
    toolchain: Toolchain | None = None,
    ports: Mapping[str, GraphPorts] | None = None,
) -> CompiledModel:
    """Compile DLCs into one context binary. Equal DLCs and options give equal bytes.

    Args:
        model: the DLCs; of several models one binary is made.
        config: how they are compiled.
        toolchain: by default that of PyPI.
        ports: see `Toolchain.compile`.

    Raises:
        InvalidOptionError: the toolchain cannot honour an option.
        ToolchainError: a DLC is refused, or the compiler died.
    """
    if toolchain is None:
        toolchain = OrtQnnToolchain()
    toolchain.check(config)
    models = [model] if isinstance(model, StageModel) else model
    paths = [path for each in models for path in each.paths]
    for path in paths:
        if not is_dlc(path):
            raise InputFileError(str(path), "it is no DLC: convert it first")
    scratch = _Scratch()
    binary = scratch.path / f"{paths[0].stem}.bin"
    toolchain.compile(paths, binary, config, ports=ports)
    return CompiledModel(binary, config, toolchain, scratch)
