"""What a model folder holds: ONNX with encodings, or a checkpoint that becomes that first."""

from dataclasses import dataclass
from pathlib import Path

from buildlib.checkpoint.layout import CONFIG_FILE, ENCODINGS_FILE, MODEL_FILE, TOKENIZER_FILE
from buildlib.errors import CalibrationTextMissingError, ModelNotFoundError

CALIBRATION_TEXT = Path("text") / "calibration.txt"
_MAX_TEXT_BYTES = 64 << 20


@dataclass(frozen=True)
class OnnxSource:
    """`model.onnx` (+ external data), `model.encodings`, `config.json`, `tokenizer.json`."""

    folder: Path

    @property
    def name(self) -> str:
        """Name of the model: that of its folder."""
        return self.folder.resolve().name

    def inputs(self) -> list[Path]:
        """Every file that decides what is built."""
        return sorted(path for path in self.folder.iterdir() if path.is_file())


@dataclass(frozen=True)
class CheckpointSource:
    """A Hugging Face checkpoint, and the text its quantization is calibrated on."""

    folder: Path
    calibration_text: str

    @property
    def name(self) -> str:
        """Name of the model: that of its folder."""
        return self.folder.resolve().name

    def inputs(self) -> list[Path]:
        """Every file that decides what is built; the calibration text comes on top."""
        names = (CONFIG_FILE, TOKENIZER_FILE)
        weights = sorted(self.folder.glob("*.safetensors*"))
        return [path for path in (self.folder / name for name in names) if path.is_file()] + weights


ModelSource = OnnxSource | CheckpointSource


def find_source(folder: Path, calibration_text: str | None) -> ModelSource:
    """Tell by its files what a model folder holds.

    Raises:
        ModelNotFoundError: no folder, or nothing in it that can be built.
        CalibrationTextMissingError: a checkpoint without text.
    """
    if not folder.is_dir():
        raise ModelNotFoundError(str(folder), "there is no such folder")
    needed = [CONFIG_FILE, TOKENIZER_FILE]
    is_onnx = (folder / MODEL_FILE).is_file()
    if is_onnx:
        needed.append(ENCODINGS_FILE)
    missing = [name for name in needed if not (folder / name).is_file()]
    if missing:
        raise ModelNotFoundError(str(folder), f"{missing[0]} is missing")
    if is_onnx:
        return OnnxSource(folder)
    if not any(folder.glob("*.safetensors")):
        reason = f"it holds neither {MODEL_FILE} with {ENCODINGS_FILE} nor model.safetensors"
        raise ModelNotFoundError(str(folder), reason)
    return CheckpointSource(folder, calibration_text or _own_text(folder))


def _own_text(folder: Path) -> str:
    path = folder / CALIBRATION_TEXT
    if not path.is_file() or path.stat().st_size > _MAX_TEXT_BYTES:
        raise CalibrationTextMissingError(str(folder))
    return path.read_text(encoding="utf-8", errors="replace")
