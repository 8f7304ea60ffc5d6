"""Containers made again from what the cache has: for the emulator, or with other binaries.

emulator_twin(GenAIContainer.load("phone"), "twin")
"""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from buildlib.builder.stages.compile_part import CompilePart
from buildlib.cache.layout import (
    CacheEntry,
    entry_folders,
    entry_name,
)
from buildlib.cache.records import read_files, read_info
from buildlib.container.container import GenAIContainer
from buildlib.container.manifest import (
    GENIE_CONFIG,
    GENIE_CONTRACT,
    HTP_CONFIG,
    TOKENIZER,
)
from buildlib.container.writer import ContainerContents, ContainerFile, write_container
from buildlib.errors import CacheError, ContainerError
from buildlib.paths import default_cache_root, user_path
from buildlib.targets import Target, parse_target
from buildlib.toolchains.base import GraphPorts
from buildlib.toolchains.compile_config import CompileConfig
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain
from buildlib.toolchains.registry import toolchain_of


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
        raise ContainerError(str(container.path), no_packages(phone))
    target = Target(phone.soc, emulator=True)
    root = cache_folder(cache_root)
    with tempfile.TemporaryDirectory(prefix="qnnfarm-twin-") as scratch:
        binaries = {}
        for number, (name, record) in enumerate(metadata.files.items()):
            if record.kind == "binary" and metadata.target.weight_sharing:
                path = binaries[name] = Path(scratch) / f"{number}.bin"
                entries = compiled_from(root, name, record.sha256)
                dlcs = [dlc for entry in entries for dlc in sorted(entry.glob("*.dlc"))]
                config = config_of(root, name, record.sha256)
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
                toolchain.check(unshared)
                toolchain.compile(dlcs, path, unshared, ports=ports)
        return write_again(container, binaries, user_path(dest), target)


def write_again(
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


def no_packages(target: Target) -> str:
    """Say why a container with op packages is not made again."""
    return f"it has no op packages for x86_64: build it for {target.soc.name}:emulator, too"


def cache_folder(given: str | os.PathLike[str] | None) -> Path:
    """Return the root of a cache, by default the user's."""
    return default_cache_root() if given is None else user_path(given)


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


def config_of(root: Path, name: str, sha256: str) -> CompileConfig:
    """Return the options that a context binary was compiled with."""
    return CompileConfig.model_validate(read_info(compile_entry(root, name, sha256)).config)


def entry_beside(beside: Path, digest: str) -> CacheEntry:
    """Return the entry of a hash, in any folder of the cache that another entry is in."""
    places = beside.absolute().parent.parent.glob(f"*/{entry_name('*', digest)}")
    folder = next(places, None)
    if folder is None:
        raise CacheError(str(beside), f"its input {digest[:12]} is no longer in the cache")
    return CacheEntry(folder.name.partition("_")[0], folder, digest, reused=True)
