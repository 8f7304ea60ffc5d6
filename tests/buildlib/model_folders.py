"""Model folders as users have them, from the exports that are kept as fixtures."""

import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, processors

from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.checkpoint.tokenizer import text_windows
from buildlib.encodings.files import save_encodings
from buildlib.encodings.model import Encodings
from buildlib.graph.decoder import export_onnx
from buildlib.graph.shape import GraphShape
from buildlib.quantize.calibration import window_count, window_length
from buildlib.quantize.recipe import complete_encodings
from tests.system import needs

EXPORTS = Path(__file__).parents[1] / "fixtures" / "exports"
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def write_tokenizer(folder: Path, size: int, bos: int | None = None) -> None:
    """Write a tokenizer of a letter a token, from U+0100 on, which puts `bos` before texts."""
    letters = {chr(0x100 + token): token for token in range(size)}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token=chr(0x100)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if bos is not None:
        letter = chr(0x100 + bos)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{letter} $A", special_tokens=[(letter, bos)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))


def export_checkpoint(
    checkpoint_dir: Path, text: str, folder: Path, shape: GraphShape, n_windows: int | None = None
) -> Path:
    """Fill a folder with ONNX, as a build makes it of a checkpoint, and W8A16 encodings."""
    checkpoint = Checkpoint.load(checkpoint_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for path in (checkpoint.folder / "config.json", checkpoint.tokenizer_path):
        shutil.copyfile(path, folder / path.name)
    length, bos = window_length(shape), checkpoint.config.bos_token_id
    count = n_windows or window_count(length)
    windows = text_windows(checkpoint.tokenizer_path, text, length, bos, count)
    model = export_onnx(checkpoint, shape, folder)
    encodings = complete_encodings(model, Encodings(), checkpoint.config, windows)
    save_encodings(encodings, folder / "model.encodings")
    return folder


def copy_of_export(name: str, target: Path, *, text: bool = True) -> Path:
    """An export with a tokenizer of a letter a token, and `text` to calibrate on."""
    needs("plugins.onnx_exports")
    shutil.copytree(EXPORTS / name, target)
    config = json.loads((target / "config.json").read_text())
    size = config["vocab_size"]
    write_tokenizer(target, size, config.get("bos_token_id"))
    if text:
        (target / "text").mkdir()
        letters_in_turn = (chr(0x103 + (7 * i * i + 3 * i) % (size - 3)) for i in range(400))
        (target / "text" / "calibration.txt").write_text("".join(letters_in_turn))
    return target
