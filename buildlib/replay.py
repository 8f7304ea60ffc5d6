"""Run stages of the cache again, as they were or with other options.

    convert(load(part), config=sidecar["config"]).save("part.dlc")

    sidecar = json.loads((entry / "builder_cache_info.json").read_text())
    config = CompileConfig.model_validate(sidecar["config"])
    compile(load(dlc), config).save("model.bin")

    emulator_twin(GenAIContainer.load("phone"), "twin")
    expose_tensors(GenAIContainer.load("phone"), ["layer_3_*"], "exposed")

Names: `qairt.load`, `.arcl`, `.transform`, `.convert`, `.compile`, docs.qualcomm.com 80-87189-2.
"""

import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from buildlib.builder.options import MhaConfig, SplitModelConfig
from buildlib.builder.parts import Part
from buildlib.builder.stage import CachedStage
from buildlib.builder.stages.arcl import ConvertShape
from buildlib.builder.stages.compile_part import CompilePart
from buildlib.builder.stages.convert import Convert
from buildlib.builder.stages.transform import Transform
from buildlib.cache.layout import (
    FILES,
    LAST_USED,
    SIDECAR,
    CacheEntry,
    entry_folders,
    entry_name,
)
from buildlib.cache.records import read_files, read_info
from buildlib.container.container import GenAIContainer
from buildlib.container.dlc import is_dlc
from buildlib.container.manifest import (
    GENIE_CONFIG,
    GENIE_CONTRACT,
    HIDDEN_STATES,
    HTP_CONFIG,
    RESCALED,
    TOKENIZER,
)
from buildlib.container.op_packages import registrations
from buildlib.container.writer import ContainerContents, ContainerFile, write_container
from buildlib.errors import CacheError, ContainerError, InputFileError, InvalidOptionError
from buildlib.files import atomic_path, scratch_folder
from buildlib.graph.files import load_model, save_model
from buildlib.graph.shape import GraphShape
from buildlib.passes.mha2sha import whole_name
from buildlib.paths import default_cache_root, user_path
from buildlib.quantize.options import QuantizationOptions
from buildlib.targets import Target, parse_target
from buildlib.toolchains.base import BinaryInfo, GraphPorts, OpPackageLibrary, Toolchain
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


def emulator_twin(
    container: GenAIContainer,
    dest: str | os.PathLike[str],
    *,
    cache_root: str | os.PathLike[str] | None = None,
) -> GenAIContainer:
    """Make a phone's container again for the emulator of its SoC, which cannot run shared weights.

    Binaries that share weights are compiled from the same DLCs with the same options but for that,
    as the stage cache has them. Others are taken byte for byte. Of Genie's configuration only how
    threads wait changes.

    Args:
        container: of a dialog, for a phone.
        dest: a new folder.
        cache_root: of the build that made the container.

    Raises:
        CacheError: the cache does not have what a binary was compiled from.
        ContainerError: it is for the emulator already, or the folder cannot be written.
        ToolchainError: the compiler refuses or dies.
    """
    metadata = container.metadata
    phone = parse_target(metadata.target.name)
    if phone.emulator:
        reason = f"it is for the emulator already: name the one that was built for {phone.soc.name}"
        raise ContainerError(str(container.path), reason)
    if metadata.op_packages:
        raise ContainerError(str(container.path), _no_packages(phone))
    target = Target(phone.soc, emulator=True)
    root = _cache_root(cache_root)
    with tempfile.TemporaryDirectory(prefix="qnnfarm-twin-") as scratch:
        binaries = {}
        for number, (name, record) in enumerate(metadata.files.items()):
            if record.kind == "binary" and metadata.target.weight_sharing:
                path = binaries[name] = Path(scratch) / f"{number}.bin"
                entries = compiled_from(root, name, record.sha256)
                dlcs = [dlc for entry in entries for dlc in sorted(entry.glob("*.dlc"))]
                config = _config_of(root, name, record.sha256)
                context = config.context.model_copy(
                    update={"weight_sharing_enabled": False, "lora_weight_sharing": None}
                )
                unshared = config.model_copy(update={"soc_details": target, "context": context})
                ports = None
                if metadata.contract != GENIE_CONTRACT:  # others count on the order of tensors
                    graphs = OrtQnnToolchain().inspect(container.files[name]).graphs
                    ports = {
                        graph.name: GraphPorts(graph.inputs, graph.outputs) for graph in graphs
                    }
                toolchain = toolchain_of(metadata.toolchain)
                compile(load(dlcs), unshared, toolchain=toolchain, ports=ports).save(path)
        return _write_again(container, binaries, user_path(dest), target)


def expose_tensors(
    container: GenAIContainer,
    names: Sequence[str],
    dest: str | os.PathLike[str],
    *,
    cache_root: str | os.PathLike[str] | None = None,
) -> GenAIContainer:
    """Make a container again with inner tensors among the outputs of its graphs.

    The stages after `transform` run again for the parts that have any. Of a tensor that the graphs
    have in pieces, each piece is an output: `layer_0_scores_head_0`, `layer_0_scores_head_1`.

    Args:
        names: of tensors, as in the model before it was split; with `*` and `?` as in file names.
        dest: a new folder.
        cache_root: of the build that made the container.

    Raises:
        CacheError: the cache does not have what a binary was compiled from.
        ContainerError: its op packages cannot be compiled here, or the folder cannot be written.
        InvalidOptionError: no graph has any of them inside.
        ToolchainError: the compiler refuses or dies.
    """
    metadata = container.metadata
    toolchain = toolchain_of(metadata.toolchain)
    target = parse_target(metadata.target.name)
    if metadata.op_packages and not target.emulator:
        raise ContainerError(str(container.path), _no_packages(target))
    packages = [
        OpPackageLibrary(container.path / one.file, one.provider)
        for one in registrations(metadata.op_packages)
    ]
    root = _cache_root(cache_root)
    with tempfile.TemporaryDirectory(prefix="qnnfarm-expose-") as scratch:
        binaries = {}
        for number, name in enumerate(container.genie_config.ctx_bins):
            sha256 = metadata.files[name].sha256
            graphs: list[tuple[Path, bool]] = []
            for entry in compiled_from(root, name, sha256):
                folder = Path(scratch) / f"{number}_{len(graphs)}"
                graphs += [_with_outputs(qdq, names, folder) for qdq in entry.glob("*.qdq.onnx")]
            if not any(has_inner for _, has_inner in graphs):
                continue
            dlcs = []
            for qdq, _ in graphs:
                dlcs.append(qdq.with_name(f"{qdq.name.removesuffix('.qdq.onnx')}.dlc"))
                toolchain.convert(qdq, dlcs[-1], target)
            binaries[name] = Path(scratch) / f"{number}.bin"
            toolchain.compile(dlcs, binaries[name], _config_of(root, name, sha256), packages)
        if not binaries:
            reason = f"the compiled graphs have no {', '.join(names)} inside"
            raise InvalidOptionError("tensor", reason, ())
        return _write_again(container, binaries, user_path(dest), target)


def _with_outputs(qdq: Path, names: Sequence[str], folder: Path) -> tuple[Path, bool]:
    """Write a QDQ model with inner tensors among its outputs; tell whether it has any."""
    model = load_model(qdq)
    outputs = set(model.graph.outputs)
    inner = [
        value
        for node in model.graph
        if node.op_type == "QuantizeLinear"
        for value in node.outputs
        if value not in outputs and _matches(whole_name(str(value.name))[0], names)
    ]
    model.graph.outputs.extend(inner)
    return save_model(model, folder / qdq.name), bool(inner)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _write_again(
    container: GenAIContainer, binaries: Mapping[str, Path], dest: Path, target: Target
) -> GenAIContainer:
    """Write a container with other binaries in place of those of their names, for a target."""
    metadata, dialog, htp = container.metadata, container.genie_config, container.htp_config
    options = metadata.options
    if target.emulator and not metadata.target.emulator:
        dialog, htp = dialog.for_emulator(), htp.without_sharing()
        options = {
            **options,
            "target": str(target),
            "context.weight_sharing_enabled": False,
        }
    files = {
        name: ContainerFile(binaries.get(name, container.files[name]), record.kind)
        for name, record in metadata.files.items()
        if record.kind != "op_package"
    }
    apart = {*dialog.ctx_bins, TOKENIZER, GENIE_CONFIG, HTP_CONFIG}
    draft = ContainerContents(
        target=target,
        model=metadata.model,
        graphs=metadata.graphs,
        genie_config=dialog,
        htp_config=htp,
        tokenizer=files[TOKENIZER].path,
        binaries={name: files[name].path for name in dialog.ctx_bins},
        toolchain=metadata.toolchain,
        options=options,
        extras={name: file for name, file in files.items() if name not in apart},
        op_packages=tuple(one.resolved(container.path) for one in metadata.op_packages),
        contract=metadata.contract,
    )
    return write_container(draft, dest)


def _no_packages(target: Target) -> str:
    return f"it has no op packages for x86_64: build it for {target.soc.name}:emulator, too"


def _cache_root(given: str | os.PathLike[str] | None) -> Path:
    return default_cache_root() if given is None else user_path(given)


def optimized_model(container: GenAIContainer, cache_root: Path | None = None) -> Path | None:
    """Return the folder of a container's model as its weights and channels were changed.

    None if they were not.

    Raises:
        CacheError: the cache does not have what the container was made of.
    """
    if container.metadata.model.quantization.keys().isdisjoint({RESCALED, HIDDEN_STATES}):
        return None
    name = container.genie_config.ctx_bins[0]
    folder = compiled_from(_cache_root(cache_root), name, container.metadata.files[name].sha256)[0]
    while not folder.name.startswith("optimize_"):
        folder = entry_beside(folder, read_files(folder).sources[0]).folder
    return folder


def compiled_from(root: Path, name: str, sha256: str) -> list[Path]:
    """Return the entries with the DLCs that a context binary was compiled from, in their order."""
    folder = compile_entry(root, name, sha256)
    return [entry_beside(folder, digest).folder for digest in read_files(folder).sources]


def compile_entry(root: Path, name: str, sha256: str) -> Path:
    """Return the entry of a context binary."""
    for folder in entry_folders(root):
        if folder.name.startswith(f"{CompilePart.operation}_"):
            files = read_files(folder).files.values()
            if sha256 in {file.sha256 for file in files}:
                return folder
    reason = (
        f"it does not have what {name} was compiled from: build the container again, or import it "
        "with --no-weight-sharing if its graphs share none"
    )
    raise CacheError(str(root), reason)


def _config_of(root: Path, name: str, sha256: str) -> CompileConfig:
    return CompileConfig.model_validate(read_info(compile_entry(root, name, sha256)).config)


def entry_beside(beside: Path, digest: str) -> CacheEntry:
    """Return the entry of a hash, in any folder of the cache that another entry is in."""
    places = beside.absolute().parent.parent.glob(f"*/{entry_name('*', digest)}")
    folder = next(places, None)
    if folder is None:
        raise CacheError(str(beside), f"its input {digest[:12]} is no longer in the cache")
    return CacheEntry(folder.name.partition("_")[0], folder, digest, reused=True)
