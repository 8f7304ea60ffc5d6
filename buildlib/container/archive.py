"""`<model>.genie.zip`: a bundle as one file, in the layout in which AI Hub offers them.

Equal containers give equal bytes: files stand in the order of their names, with one time and one
mode, and are stored as they are, since weights hardly get smaller.
"""

import stat
import zipfile
from collections.abc import Mapping
from pathlib import Path

from buildlib.container.files import check_file, pour
from buildlib.container.layout import ARCHIVE_SUFFIX
from buildlib.container.manifest import FileRecord
from buildlib.container.placement import placed_file
from buildlib.errors import ContainerFileError

_EARLIEST = (1980, 1, 1, 0, 0, 0)
_UNIX = 3


def write_archive(folder: Path, files: Mapping[str, FileRecord], destination: Path) -> None:
    """Write the files of a folder below one folder that is named as the archive.

    Raises:
        ContainerExistsError: the destination is there.
        ContainerFileError: a file is not what its record says.
        ContainerError: the archive cannot be written.
    """
    top = destination.name.removesuffix(ARCHIVE_SUFFIX).removesuffix(".zip") or "bundle"
    with (
        placed_file(destination) as sink,
        zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED, strict_timestamps=True) as archive,
    ):
        for name, record in sorted(files.items()):
            check_file(folder, name, record)
            header = zipfile.ZipInfo(f"{top}/{name}", _EARLIEST)
            header.create_system = _UNIX
            header.external_attr = (stat.S_IFREG | 0o644) << 16
            header.file_size = record.size_bytes  # decides between 32 and 64 bits
            with archive.open(header, "w") as member:
                written = pour(folder / name, member, record.kind)
            if written != record:
                raise ContainerFileError(str(folder), name, "has changed since it was written")
