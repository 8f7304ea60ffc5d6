"""Containers with inner tensors among their outputs, and the models that they were made of.

expose_tensors(GenAIContainer.load("phone"), ["layer_3_*"], "exposed")
"""

import os
import tempfile
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from buildlib.cache.records import read_files
from buildlib.container.container import GenAIContainer
from buildlib.container.manifest import (
    HIDDEN_STATES,
    RESCALED,
)
from buildlib.container.op_packages import registrations
from buildlib.errors import ContainerError, InvalidOptionError
from buildlib.graph.files import load_model, save_model
from buildlib.passes.mha2sha import whole_name
from buildlib.paths import user_path
from buildlib.replay import (
    cache_folder,
    compiled_from,
    config_of,
    entry_beside,
    no_packages,
    write_again,
)
from buildlib.targets import parse_target
from buildlib.toolchains.base import OpPackageLibrary
from buildlib.toolchains.registry import toolchain_of


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
        raise ContainerError(str(container.path), no_packages(target))
    packages = [
        OpPackageLibrary(container.path / one.file, one.provider)
        for one in registrations(metadata.op_packages)
    ]
    root = cache_folder(cache_root)
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
            toolchain.compile(dlcs, binaries[name], config_of(root, name, sha256), packages)
        if not binaries:
            reason = f"the compiled graphs have no {', '.join(names)} inside"
            raise InvalidOptionError("tensor", reason, ())
        return write_again(container, binaries, user_path(dest), target)


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


def optimized_model(container: GenAIContainer, cache_root: Path | None = None) -> Path | None:
    """Return the folder of a container's model as its weights and channels were changed.

    None if they were not.

    Raises:
        CacheError: the cache does not have what the container was made of.
    """
    if container.metadata.model.quantization.keys().isdisjoint({RESCALED, HIDDEN_STATES}):
        return None
    name = container.genie_config.ctx_bins[0]
    folder = compiled_from(cache_folder(cache_root), name, container.metadata.files[name].sha256)[0]
    while not folder.name.startswith("optimize_"):
        folder = entry_beside(folder, read_files(folder).sources[0]).folder
    return folder
