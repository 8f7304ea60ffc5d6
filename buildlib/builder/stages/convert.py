"""`convert`: a part with its encodings applied as QDQ, and as a DLC."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from buildlib.builder.original_paths import original_paths
from buildlib.builder.parts import Part
from buildlib.builder.stage import CachedStage
from buildlib.cache.layout import CacheEntry
from buildlib.encodings.files import load_encodings
from buildlib.graph.shape import GraphShape
from buildlib.passes.base import ENCODINGS_SUFFIX
from buildlib.quantize.options import QuantizationOptions
from buildlib.quantize.qdq import apply_encodings
from buildlib.targets import Target
from buildlib.toolchains.base import Toolchain


@dataclass(frozen=True)
class Convert(CachedStage):
    """One part at one shape, quantized and as a DLC.

    Attributes:
        split: the parts at `shape`.
        weights: the part's integer weights.
        quantization: bits that were asked for; encodings of the user have their own.
    """

    operation = "convert"
    compiles = True
    split: CacheEntry
    weights: CacheEntry
    shape: GraphShape
    part: Part
    target: Target
    toolchain: Toolchain
    quantization: QuantizationOptions

    @property
    def subject(self) -> str:
        return self.part.graph(self.shape)

    @property
    def source(self) -> Path:
        return self.split.folder / f"{self.subject}.onnx"

    @property
    def options(self) -> Mapping[str, object]:
        return {
            "part": self.subject,
            "target": self.target.soc.name,  # its emulator takes the same DLC
            "export_format": "DLC_DEFAULT",
            "act_precision": str(self.quantization.act_bitwidth),
            "weights_precision": str(self.quantization.param_bitwidth),
            "per_channel_quantization": "True",
        }

    def run(self, folder: Path) -> None:
        encodings = load_encodings(self.source.with_suffix(ENCODINGS_SUFFIX))
        weights = self.weights.folder / f"{self.part.stem}.weights"
        qdq = apply_encodings(self.source, encodings, folder / f"{self.subject}.qdq.onnx", weights)
        with original_paths(None, {qdq: Path(qdq.name)}):
            self.toolchain.convert(qdq, folder / f"{self.subject}.dlc", self.target)
