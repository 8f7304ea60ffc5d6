"""`export`: a checkpoint as float ONNX, with encodings calibrated on text."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from buildlib.builder.sources import CheckpointSource
from buildlib.builder.stage import CachedStage
from buildlib.cache.key import text_sha256
from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.checkpoint.layout import CONFIG_FILE, ENCODINGS_FILE
from buildlib.checkpoint.tokenizer import text_windows
from buildlib.encodings.files import save_encodings
from buildlib.encodings.model import Encodings
from buildlib.files import atomic_write_bytes
from buildlib.graph.decoder import export_onnx
from buildlib.graph.shape import GraphShape
from buildlib.quantize.bitwidths import Bitwidths
from buildlib.quantize.calibration import window_count, window_length
from buildlib.quantize.options import QuantizationOptions, RangeName
from buildlib.quantize.recipe import complete_encodings


@dataclass(frozen=True)
class Export(CachedStage):
    """The checkpoint's model in canonical form, with encodings for all of it.

    Attributes:
        files: SHA-256 of the checkpoint's files by name.
        shape: of the ONNX; a prefill shape, as calibration runs at it.
        quantization: bits of everything.
    """

    operation = "export"
    checkpoint: CheckpointSource
    files: Mapping[str, str]
    shape: GraphShape
    quantization: QuantizationOptions

    @property
    def subject(self) -> str:
        return self.checkpoint.name

    @property
    def source(self) -> Path:
        return self.checkpoint.folder

    @property
    def options(self) -> Mapping[str, object]:
        return {
            "ar": self.shape.ar,
            "cl": self.shape.cl,
            "quantization": self.quantization,
            "calibration_sha256": text_sha256(self.checkpoint.calibration_text),
        }

    def run(self, folder: Path) -> None:
        bits = Bitwidths.from_options(self.quantization)
        text = self.checkpoint.calibration_text
        ranges = self.quantization.activation_ranges
        export_checkpoint(self.checkpoint.folder, text, folder, self.shape, bits, ranges=ranges)


def export_checkpoint(
    checkpoint_dir: Path,
    calibration_text: str,
    out_dir: Path,
    shape: GraphShape,
    bitwidths: Bitwidths | None = None,
    *,
    n_windows: int | None = None,
    ranges: RangeName = "minmax",
) -> Path:
    """Export a checkpoint without torch, into the folder that the Gen AI Builder takes.

    The folder gets `config.json`, `tokenizer.json`, `model.onnx` with the checkpoint's own
    safetensors beside it, and `model.encodings`.

    Args:
        checkpoint_dir: in Hugging Face layout, with its `tokenizer.json`.
        calibration_text: of the kind that the model was trained on.
        out_dir: made if need be.
        shape: of the ONNX; a prefill shape, as calibration runs at it.
        bitwidths: of weights and activations; by default W8A16.
        n_windows: windows of text, spread over all of it, that calibrate activations; by default
            `window_count`.
        ranges: estimator of the ranges of activations.
    """
    checkpoint = Checkpoint.load(checkpoint_dir)
    checkpoint.check_content()
    length = window_length(shape)
    windows = text_windows(
        checkpoint.tokenizer_path,
        calibration_text,
        length,
        checkpoint.config.bos_token_id,
        n_windows or window_count(length),
    )
    out_dir.mkdir(parents=True, exist_ok=True)
    for path in (checkpoint.folder / CONFIG_FILE, checkpoint.tokenizer_path):
        atomic_write_bytes(out_dir / path.name, path.read_bytes())
    model = export_onnx(checkpoint, shape, out_dir)
    encodings = complete_encodings(
        model, Encodings(), checkpoint.config, windows, bitwidths, ranges=ranges
    )
    save_encodings(encodings, out_dir / ENCODINGS_FILE)
    return out_dir
