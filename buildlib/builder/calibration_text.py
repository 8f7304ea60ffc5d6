"""The text that calibrates a model: the user's, that of the model's folder, or the default one.

The default text lies in `default_text/`, whose README says whose it is. Its conversations are
rendered by the model's own chat template, so that calibration sees the tokens that chats have.
"""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Final

from buildlib.checkpoint.layout import CALIBRATION_TEXT
from buildlib.container.chat_template import ChatTemplate
from buildlib.errors import ContainerError, InputFileError
from buildlib.files import check_file

DEFAULT_TEXT_USED: Final = (
    f"no {CALIBRATION_TEXT} and no --calibration FILE: it is calibrated on the text that comes "
    "with qnnfarm (prose, conversations, code, 21 languages)"
)
_MAX_TEXT_BYTES = 64 << 20
_FOLDER = Path(__file__).parent / "default_text"
_TEXTS = ("prose.txt", "languages.txt", "code.txt")
_DIALOGUES = "dialogues.json"
_BETWEEN = "\n%%\n"
_ROLES = ("user", "assistant")
_DATE = "2026-01-01"
"""For templates that write today's: the text, and with it the container, must stay the same."""


def folder_text(folder: Path) -> str | None:
    """Read the calibration text of a model's folder; None if it has none."""
    path = folder / CALIBRATION_TEXT
    return read_text(path) if os.path.lexists(path) else None


def read_text(path: Path) -> str:
    """Read a text to calibrate on.

    Raises:
        InputFileError: it is no file, too large, or no text in UTF-8.
    """
    try:
        check_file(path)
        size = path.stat().st_size
        if size > _MAX_TEXT_BYTES:
            reason = f"it has {size} bytes and may have {_MAX_TEXT_BYTES}; keep a part of it"
            raise InputFileError(str(path), reason)
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputFileError(str(path), error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise InputFileError(str(path), f"no text in UTF-8: {error.reason}") from error
    if "\0" in text:
        raise InputFileError(str(path), "no text: it holds NUL characters")
    return text


def default_text(template: ChatTemplate | None, folder: Path) -> str:
    """Return the default text, its conversations as a model's chat template writes them.

    Args:
        template: without one, or if it refuses these conversations, they are plain text.
        folder: of the template, for errors.
    """
    kinds = [(_FOLDER / name).read_text(encoding="utf-8").split(_BETWEEN) for name in _TEXTS]
    dialogues = json.loads((_FOLDER / _DIALOGUES).read_text(encoding="utf-8"))
    kinds.append(_rendered(dialogues, template, folder))
    dealt = [(place / len(kind), piece) for kind in kinds for place, piece in enumerate(kind)]
    return "\n\n".join(piece.strip("\n") for _, piece in sorted(dealt, key=lambda each: each[0]))


def _rendered(
    dialogues: Sequence[Sequence[str]], template: ChatTemplate | None, folder: Path
) -> list[str]:
    if template is not None:
        conversations = [
            [
                {"role": role, "content": turn}
                for role, turn in zip(cycle(_ROLES), turns, strict=False)
            ]
            for turns in dialogues
        ]
        with suppress(ContainerError):  # one that takes no such turns; chats say why
            texts = template.render(conversations, folder, add_generation_prompt=False, date=_DATE)
            begin = dict(template.special_tokens).get("bos_token", "")
            return [text.removeprefix(begin) for text in texts]
    labels = [f"{role.capitalize()}: " for role in _ROLES]
    return [
        "\n".join(label + turn for label, turn in zip(cycle(labels), turns, strict=False))
        for turns in dialogues
    ]
