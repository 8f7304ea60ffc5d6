"""The builder's stages, each a plain function: what it reads, what it is told, the folder it fills.

export      checkpoint -> float ONNX + encodings
arcl        float ONNX -> float ONNX at another (AR, CL)
transform   float ONNX -> its parts, cut at layer boundaries
convert     part + encodings -> QDQ ONNX and DLC
compile     the DLCs of one part -> context binary
package     binaries and configurations -> container (`buildlib.package`)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from buildlib.checkpoint.layout import MODEL_FILE
from buildlib.container.layout import binary_name
from buildlib.graph.shape import GraphShape
from buildlib.targets import Target
from buildlib.toolchains.base import CompileConfig, Toolchain


@dataclass(frozen=True)
class Part:
    """One of the parts that a model is cut into, counted from 1."""

    number: int
    count: int

    def stem(self, shape: GraphShape) -> str:
        """Name of the part's files and graph at a shape: `ar32_cl192_1_of_2`."""
        return f"{shape}_{self.number}_of_{self.count}"

    def binary_name(self, model: str) -> str:
        """Name of the part's context binary, as AI Hub's bundles have it."""
        return binary_name(model, self.number, self.count)


def export(checkpoint: Path, calibration_text: str, shape: GraphShape, folder: Path) -> None:
    """Fill `folder` with ONNX, encodings, configuration and tokenizer."""
    from buildlib.quantize.export import export_checkpoint

    export_checkpoint(checkpoint, calibration_text, folder, shape)


def arcl(model: Path, shape: GraphShape, folder: Path) -> None:
    """Write the same model for another (AR, CL); weights stay shared."""
    from buildlib.passes.arcl import convert_arcl

    convert_arcl(model, shape, folder / MODEL_FILE)


def transform(model: Path, n_splits: int, folder: Path) -> None:
    """Cut a model into its parts, `{shape}_{k}_of_{n}.onnx`."""
    from buildlib.passes.split import split_model

    split_model(model, n_splits, folder)


def convert(part: Path, stem: str, target: Target, toolchain: Toolchain, folder: Path) -> None:
    """Apply the encodings beside the part as QDQ and convert to a DLC."""
    from buildlib.encodings.model import Encodings
    from buildlib.passes.base import ENCODINGS_SUFFIX
    from buildlib.quantize.qdq import apply_encodings

    encodings = part.with_suffix(ENCODINGS_SUFFIX)
    qdq = apply_encodings(part, Encodings.load(encodings), folder / f"{stem}.qdq.onnx")
    toolchain.convert(qdq, folder / f"{stem}.dlc", target)


def compile_part(
    dlcs: Sequence[Path], config: CompileConfig, toolchain: Toolchain, binary: Path
) -> None:
    """Compile the graphs of one part into one context binary."""
    toolchain.compile(dlcs, binary, config)
