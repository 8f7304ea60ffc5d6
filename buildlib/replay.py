"""Compile DLCs of the cache again, as the build did or with other options.

    sidecar = json.loads((entry / "builder_cache_info.json").read_text())
    config = CompileConfig.model_validate(sidecar["config"])
    compile(load(dlc), config).save("model.bin")

Names: `qairt.load`, `qairt.compile`, docs.qualcomm.com 80-87189-2.
"""

import os
import shutil
import tempfile
import weakref
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from buildlib.errors import InputFileError
from buildlib.files import atomic_path
from buildlib.paths import user_path
from buildlib.toolchains.base import BinaryInfo, Toolchain
from buildlib.toolchains.compile_config import CompileConfig

_STRUCTURE = "model"


@dataclass(frozen=True)
class DlcModel:
    """DLCs that make one context binary, each with one graph named by its stem."""

    paths: tuple[Path, ...]

    @property
    def graph_names(self) -> tuple[str, ...]:
        """Names that the graphs have in a binary."""
        return tuple(path.stem for path in self.paths)


class CompiledModel:
    """A context binary in a temporary folder, which goes with this object; save it to keep it."""

    def __init__(self, path: Path, config: CompileConfig, toolchain: Toolchain) -> None:
        self.path = path
        self.config = config
        self._toolchain = toolchain
        self._remove = weakref.finalize(self, shutil.rmtree, path.parent, ignore_errors=True)

    def inspect(self) -> BinaryInfo:
        """Describe the binary.

        Raises:
            InvalidBinaryError: it cannot be read as one.
        """
        return self._toolchain.inspect(self.path)

    def save(self, dest: str | os.PathLike[str], *, exist_ok: bool = False) -> Path:
        """Copy the binary atomically to a file, or under its own name into a folder.

        Raises:
            InputFileError: there is such a file already.
            OSError: it cannot be written.
        """
        path = user_path(dest)
        if path.is_dir():
            path /= self.path.name
        if (path.exists() or path.is_symlink()) and not exist_ok:
            raise InputFileError(
                str(path), "it exists already; save with exist_ok=True or elsewhere"
            )
        with atomic_path(path) as unfinished:
            shutil.copyfile(self.path, unfinished)
        return path


def load(path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> DlcModel:
    """Load a DLC, or the DLCs of one part at its ARs in the order of the build.

    Raises:
        InputFileError: one is missing or no DLC, or two have the same name.
    """
    given = [path] if isinstance(path, str | os.PathLike) else list(path)
    paths = tuple(user_path(one) for one in given)
    if not paths:
        raise InputFileError("", "no DLC is named")
    for one in paths:
        _check_dlc(one)
    names = [one.stem for one in paths]
    for one in paths:
        if names.count(one.stem) > 1:
            raise InputFileError(str(one), "another DLC has its name, which is that of its graph")
    return DlcModel(paths)


def compile(  # noqa: A001 - the vendor's name
    model: DlcModel, config: CompileConfig, *, toolchain: Toolchain | None = None
) -> CompiledModel:
    """Compile DLCs into one context binary. Equal DLCs and options give equal bytes.

    Raises:
        InvalidOptionError: the toolchain cannot honour an option.
        ToolchainError: a DLC is refused, or the compiler died.
    """
    if toolchain is None:
        from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain

        toolchain = OrtQnnToolchain()
    toolchain.check(config)
    folder = Path(tempfile.mkdtemp(prefix="qnnfarm-compile-"))
    compiled = CompiledModel(folder / f"{model.paths[0].stem}.bin", config, toolchain)
    toolchain.compile(model.paths, compiled.path, config)
    return compiled


def _check_dlc(path: Path) -> None:
    if not path.is_file():
        raise InputFileError(str(path), "there is no such file")
    try:
        with zipfile.ZipFile(path) as archive:
            is_dlc = _STRUCTURE in archive.namelist()
    except (OSError, zipfile.BadZipFile, ValueError) as error:
        raise InputFileError(str(path), f"it is no DLC ({error})") from error
    if not is_dlc:
        raise InputFileError(str(path), "it is no DLC: it holds no model")
