"""The reference model: a small Llama, trained here on a public-domain text.

The folder is a Hugging Face checkpoint (`config.json`, `tokenizer.json`, `model.safetensors`) and a
package: this module tells where its files are; `tools/tiny_llama` made them. `README.md`
is the model card.
"""

from pathlib import Path


def folder() -> Path:
    """Return the checkpoint's folder, as installed."""
    return Path(__file__).parent


def heldout_text() -> str:
    """Return text that the model has not seen in training, one chapter a line."""
    return _read("heldout.txt")


def calibration_text() -> str:
    """Return an excerpt of the training text for calibration, one chapter a line."""
    return _read("calibration.txt")


def _read(name: str) -> str:
    return (folder() / "text" / name).read_text(encoding="utf-8")
