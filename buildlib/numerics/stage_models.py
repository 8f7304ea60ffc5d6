"""Models that a verification compares: the files of each stage, opened part by part."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from buildlib.checkpoint.config import DecoderConfig
from buildlib.graph.shape import GraphShape
from buildlib.numerics.comparison import Bound
from buildlib.numerics.emulator import emulator_chains
from buildlib.numerics.feeds import Embed
from buildlib.numerics.runners import Arrays, OnnxRunner, PartRunner
from buildlib.numerics.trace import OpenPart
from buildlib.targets import Target
from buildlib.toolchains.base import Toolchain
from buildlib.toolchains.compile_config import CompileConfig

Parts = Mapping[GraphShape, Sequence[Path]]


@dataclass(frozen=True)
class Version:
    """A whole model before a stage that keeps its shape.

    Attributes:
        stage: made the next version of it: `import`, `optimize`, `lora`.
        bound: of what that stage may change.
        open: opens it under the names and shapes of the canonical model; the caller closes it.
    """

    stage: str
    bound: Bound
    open: Callable[[], PartRunner]


@dataclass(frozen=True)
class StageModels:
    """Files that each stage of a build made; a stage that did not run is None.

    Attributes:
        imported: for each shape, the whole model it was converted from: the same file
            for all shapes, but for models attached for an AR.
        earlier: by file of `imported`, what it was made of, the first version first.
        arcl: the whole model at each shape.
        split: its parts, in the order of data flow.
        sha: the parts with single-head attention.
        qdq: the parts as QDQ ONNX.
        binaries: a context binary for each part, unshared, since the emulator loads no others
            (see `compile_for_emulator`).
        embed: the embedding table, of models that take `inputs_embeds`.
        constants: inputs that are the same at every call, such as LoRA weights.
    """

    config: DecoderConfig
    imported: Mapping[GraphShape, Path]
    arcl: Mapping[GraphShape, Path]
    split: Parts | None = None
    sha: Parts | None = None
    qdq: Parts | None = None
    binaries: Sequence[Path] | None = None
    earlier: Mapping[Path, Sequence[Version]] = field(default_factory=dict)
    embed: Embed | None = None
    constants: Arrays = field(default_factory=dict)

    def at(self, cl: int) -> tuple[GraphShape, ...]:
        """Return the shapes of one context length, the smallest AR first."""
        return tuple(sorted(shape for shape in self.arcl if shape.cl == cl))


def onnx_parts(chains: Mapping[int, Sequence[Path]], n_threads: int = 0) -> list[OpenPart]:
    """Return the parts of a model, float or QDQ, from their files by AR.

    Weights stay mapped from their files: a part costs its activations, and pages of the file cache.
    """
    return [
        partial(_open, dict(zip(chains, paths, strict=True)), n_threads)
        for paths in zip(*chains.values(), strict=True)
    ]


def emulated_parts(
    binaries: Sequence[Path], toolchain: Toolchain, cl: int, soc_model: int | None
) -> list[OpenPart]:
    """Return the parts of a model on the emulator, each in a process of its own while it runs."""
    return [partial(_emulate, binary, toolchain, cl, soc_model) for binary in binaries]


def compile_for_emulator(
    dlcs: Parts, target: Target, toolchain: Toolchain, folder: Path
) -> tuple[Path, ...]:
    """Compile the DLCs of a phone target for the emulator: unshared, one binary a part.

    Args:
        dlcs: parts in order, by shape.
        target: phone or emulator; the SoC is what counts.
        toolchain: compiles them.
        folder: takes `part_{k}.bin`.

    Raises:
        ToolchainError: the compiler refuses one, or died.
    """
    config = CompileConfig.for_target(Target(target.soc, emulator=True))
    binaries = []
    for number, part in enumerate(zip(*dlcs.values(), strict=True), start=1):
        binary = folder / f"part_{number}.bin"
        toolchain.compile(part, binary, config)
        binaries.append(binary)
    return tuple(binaries)


def _open(paths: Mapping[int, Path], n_threads: int) -> dict[int, PartRunner]:
    return {ar: OnnxRunner(path, n_threads=n_threads, plain=True) for ar, path in paths.items()}


def _emulate(
    binary: Path, toolchain: Toolchain, cl: int, soc_model: int | None
) -> dict[int, PartRunner]:
    chains = emulator_chains([binary], toolchain, soc_model=soc_model, cl=cl)
    return {ar: chain[0] for ar, chain in chains.items()}
