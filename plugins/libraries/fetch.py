"""Fetched libraries: the wheel for Linux boards, by pip and so by the user's index and proxy."""

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

from filelock import FileLock

from buildlib.files import atomic_folder, scratch_folder
from buildlib.toolchains.ort_qnn.wheel import DISTRIBUTION
from harness.errors import LibrariesFetchError

_PLATFORM = "manylinux_2_34_aarch64"
_PACKAGE = "onnxruntime_qnn"
_LICENSES = ("LICENSE", "Qualcomm_LICENSE.pdf", "ThirdPartyNotices.txt")
_LIBRARIES = re.compile(r"lib(Genie|QnnSystem|QnnHtp\w*)\.so")
_UNREACHED = re.compile(r"connection broken by '(.*)': /")
_TIMEOUT_S = 1800.0


def fetch_once(folder: Path, fetch: Callable[[Path, Path], None]) -> bool:
    """Make a folder of fetched files, whole or not at all; False: it was there already.

    Args:
        fetch: takes a folder for downloads and the one to fill.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if folder.is_dir():
            return False
        with atomic_folder(folder) as target, scratch_folder(folder) as downloads:
            fetch(downloads, target)
    return True


def fetch_wheel(
    version: str, folder: Path, *, pip: Sequence[str] = (sys.executable, "-m", "pip")
) -> bool:
    """Download the wheel, and keep its libraries and licenses; False: they were there already.

    Raises:
        LibrariesFetchError: pip is not there, or cannot get it; or it holds something else.
    """
    return fetch_once(folder, lambda scratch, made: _unpack(_download(version, scratch, pip), made))


def _download(version: str, folder: Path, pip: Sequence[str]) -> Path:
    requirement = f"{DISTRIBUTION}=={version}"
    command = [*pip, "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--platform", _PLATFORM, "--dest", str(folder), requirement]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LibrariesFetchError(requirement, str(error)) from error
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise LibrariesFetchError(requirement, _reason(process.stderr))
    return wheels[0]


def _reason(said: str) -> str:
    """Say why pip failed: what it says last of an index that it cannot reach is no reason."""
    if broken := _UNREACHED.findall(said):
        fault = broken[-1].rpartition(">: ")[2].strip("'\")")
        return f"pip could not reach its package index: {fault}"
    lines = [line for line in said.splitlines() if not line.startswith("WARNING")]
    return lines[-1] if lines else "pip says nothing of why"


def _unpack(archive: Path, folder: Path) -> None:
    """Take the libraries of the package's own folder, under their plain names."""
    try:
        with zipfile.ZipFile(archive) as wheel:
            for member in wheel.infolist():
                path = PurePosixPath(member.filename)
                kept = path.name in _LICENSES or _LIBRARIES.fullmatch(path.name)
                if not kept or path.parent != PurePosixPath(_PACKAGE):
                    continue
                with wheel.open(member) as source, (folder / path.name).open("wb") as target:
                    shutil.copyfileobj(source, target)
    except (zipfile.BadZipFile, OSError) as error:
        raise LibrariesFetchError(archive.name, str(error)) from error
    if not (folder / "libGenie.so").is_file():
        raise LibrariesFetchError(archive.name, "it holds no libGenie.so")
