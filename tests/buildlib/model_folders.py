"""Model folders as users have them, from the exports that are kept as fixtures."""

import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

EXPORTS = Path(__file__).parents[1] / "fixtures" / "exports"


def copy_of_export(name: str, target: Path, *, text: bool = True) -> Path:
    """An export with a tokenizer of a letter a token, and `text` to calibrate on."""
    shutil.copytree(EXPORTS / name, target)
    size = json.loads((target / "config.json").read_text())["vocab_size"]
    letters = {chr(0x100 + token): token for token in range(size)}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token=chr(0x100)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(target / "tokenizer.json"))
    if text:
        (target / "text").mkdir()
        letters_in_turn = (chr(0x103 + (7 * i * i + 3 * i) % (size - 3)) for i in range(400))
        (target / "text" / "calibration.txt").write_text("".join(letters_in_turn))
    return target
