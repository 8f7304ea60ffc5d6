"""Names of the files of a Genie bundle, as AI Hub names them."""

import re
from collections.abc import Iterable
from typing import Final

GENIE_CONFIG: Final = "genie_config.json"
HTP_CONFIG: Final = "htp_backend_ext_config.json"
TOKENIZER: Final = "tokenizer.json"
METADATA: Final = "metadata.json"
ARCHIVE_SUFFIX: Final = ".genie.zip"
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}")
_LONGEST = 1000
_LONGEST_STEM = 120  # file names end at 255 bytes, and what is unfinished has longer ones


def binary_name(model_name: str, part: int, parts: int) -> str:
    """Return the name of the context binary of a split; parts count from 1.

    A model is named after its folder, which may have a name that no file of a container can have.
    """
    return f"{archive_stem(model_name)}_part_{part}_of_{parts}.bin"


def file_name_problem(names: Iterable[str]) -> str | None:
    """Return why a name cannot be that of a file in a container, for the first bad name, or `None`.

    Names are relative paths of plain segments, so that no container reaches out of its folder,
    neither here nor on a device or in an archive.
    """
    files = set(names)
    for name in sorted(files):
        segments = name.split("/")
        if name == METADATA or len(name) > _LONGEST or not all(map(_SEGMENT.fullmatch, segments)):
            return f"{name!r} is no name for a file of a container"
        parents = {"/".join(segments[:depth]) for depth in range(1, len(segments))}
        if parents & files:
            return f"{min(parents & files)!r} is a file and a folder at once"
    return None


def archive_stem(model_name: str) -> str:
    """Return a model's name as a part of file names."""
    return re.sub(r"[^A-Za-z0-9_.+-]+", "_", model_name).lstrip(".-")[:_LONGEST_STEM] or "model"


def has_file(files: Iterable[str], name: str) -> bool:
    """Return whether a name is that of one of the files, or of a folder with some."""
    below = name.rstrip("/") + "/"
    return any(file == name or file.startswith(below) for file in files)
