"""SHA-256 of files and folders."""

import hashlib
from collections.abc import Mapping
from pathlib import Path


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def combined(hashes: Mapping[str, str]) -> str:
    """One hash over the names and the hashes of files, whatever their order."""
    lines = sorted(f"{name}\0{sha256}" for name, sha256 in hashes.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def sha256_sources(package_folder: Path, *subfolders: str) -> str:
    """One hash over Python sources: the code that made a result is part of its identity."""
    digest = hashlib.sha256()
    for subfolder in subfolders:
        root = package_folder / subfolder
        for path in sorted(root.rglob("*.py") if root.is_dir() else [root]):
            digest.update(f"{path.relative_to(package_folder)}\0{sha256_file(path)}\n".encode())
    return digest.hexdigest()
