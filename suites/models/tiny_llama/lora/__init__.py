"""LoRA adapters of the reference model: one of law, one of psalms, and the texts of both.

`lora_config.yaml` is what `LoraBuilderInputConfig(lora_config_path=)` takes.
"""

from pathlib import Path

from suites.models import tiny_llama

NAMES = ("law", "psalms")

_PSALMS_BOOK = 18  # from 0, among the books of the training text
_HELDOUT_PSALMS = slice(15, 20)  # chapters of the held-out text: psalms 2, 32, 62, 92, 122


def folder() -> Path:
    """Return the folder of the adapters, as installed."""
    return Path(__file__).parent


def heldout_text(name: str) -> str:
    """Return text of an adapter's kind that it has not seen in training."""
    if name == "law":
        return (folder() / "text" / "law_heldout.txt").read_text(encoding="utf-8")
    return "\n".join(tiny_llama.heldout_text().splitlines()[_HELDOUT_PSALMS]) + "\n"


def training_text(name: str) -> str:
    """Return text that an adapter is trained on; that of the psalms is in the repository alone."""
    if name == "law":
        return (folder() / "text" / "law_train.txt").read_text(encoding="utf-8")
    text = (tiny_llama.folder() / "text" / "train.txt").read_text(encoding="utf-8")
    return text.split("\n\n")[_PSALMS_BOOK]
