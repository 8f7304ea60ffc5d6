"""The model that a user names: a folder, a file, or an id of the Hugging Face hub.

A file that a package has a reader for, such as a GGUF, becomes a folder in Hugging Face layout in
the cache, once. A model of the hub lies where its client keeps it, in the folder of a commit.
"""

import contextlib
import importlib.metadata
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

from buildlib.builder.code_digest import own_code
from buildlib.cache.file_hashes import MEMO_FILE, hash_files
from buildlib.cache.key import StageKey
from buildlib.cache.store import StageCache
from buildlib.entry_points import entry_modules, load_entry
from buildlib.errors import ModelFileError
from buildlib.paths import absolute_user_path, default_cache_root, user_path
from buildlib.progress import working

DOOR = "checkpoints"
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+?)(?:@([\w./-]+))?")
_FILES = ("*.json", "*.jinja", "*.safetensors", "tokenizer.model", "text/*.txt")
_COMMIT = re.compile(r"[0-9a-f]{1,64}")
_SNAPSHOTS, _OF_MODEL = "snapshots", "models--"
_FILE_SUFFIXES = frozenset({".gguf", ".onnx", ".safetensors", ".bin", ".json"})


class CheckpointReader(Protocol):
    """Entry point of `qnnfarm.checkpoints`, which is a module, by the suffix of its files.

    Attributes:
        LIBRARIES: packages on whose versions its work depends.
    """

    LIBRARIES: tuple[str, ...]

    def write_checkpoint(self, path: Path, folder: Path) -> None:
        """Write the model of a file into a new folder in Hugging Face layout.

        Raises:
            InputFileError: the file is damaged, or a package is missing.
            ModelFileError: it holds no model that builds.
        """

    def inspect(self, path: Path, *, every: bool, json: bool) -> None:
        """Print what `qnnfarm inspect` shows of a file.

        Args:
            every: each tensor, not one line for equal ones.
            json: as JSON.
        """


def find_reader(path: Path) -> CheckpointReader | None:
    """Return the reader of a file; None if no package has one."""
    if not path.is_file():
        return None
    return cast("CheckpointReader | None", load_entry(DOOR, path.suffix[1:]))


@dataclass(frozen=True)
class ModelPlace:
    """A model on this machine.

    Attributes:
        path: its folder, or its ONNX file.
        name: of the model.
        file: that the folder was made of.
    """

    path: Path
    name: str
    file: Path | None = None
    _kept: StageCache | None = field(default=None, repr=False, compare=False)
    """Holds the entry of the cache: no other build removes it while this lives."""

    @property
    def folder(self) -> Path:
        """Its folder, also where it is named by its ONNX file."""
        return self.path if self.path.is_dir() else self.path.parent


def find_model(
    model: str | os.PathLike[str],
    base: Path | None = None,
    revision: str | None = None,
    cache_root: Path | None = None,
) -> ModelPlace:
    """Return the place of a model, which may have to be downloaded, or read from a file.

    Args:
        model: a path, or an id of the hub such as `Qwen/Qwen3-0.6B`, with `@` and a revision.
        base: of relative paths; by default the working folder.
        revision: branch, tag or commit of a model of the hub.
        cache_root: of what is read from a file; by default the user's cache.

    Raises:
        ModelFileError: there is none, or it cannot be had.
        InputFileError: the file is damaged.
    """
    path = (base or Path.cwd()) / user_path(model)
    if revision is not None and path.exists() and hub_origin(path) is None:
        reason = f"revision {revision!r} is of a model of the hub, and it is on this machine"
        raise ModelFileError(path, reason)
    if (reader := find_reader(path)) is not None:
        return _read_file(reader, path.absolute(), cache_root)
    if is_hub_model(path):
        path = find_snapshot(path)
    if not path.exists():
        path = _download(os.fspath(model), path, revision)
    target = path.resolve()
    folder = target if target.is_dir() else target.parent
    hub = hub_origin(folder)
    name = folder.name if hub is None else hub.partition("@")[0].rpartition("/")[2]
    return ModelPlace(path.absolute(), name)


def hub_origin(folder: Path) -> str | None:
    """Return id and commit of a model in the cache of the hub's client; None of any other folder.

    >>> hub_origin(Path("hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de2"))
    'Qwen/Qwen3-0.6B@c1899de2'
    """
    home = folder.parent.parent.name
    if folder.parent.name != _SNAPSHOTS or not home.startswith(_OF_MODEL):
        return None
    return f"{home.removeprefix(_OF_MODEL).replace('--', '/')}@{folder.name}"


def is_hub_model(folder: Path) -> bool:
    """Return whether a folder is all that the hub's client keeps of a model."""
    return folder.name.startswith(_OF_MODEL) and (folder / _SNAPSHOTS).is_dir()


def find_snapshot(home: Path) -> Path:
    """Return the commit of a model in the hub's cache that `main` names there, or the only one.

    Raises:
        ModelFileError: there are several, and `main` names none of them.
    """
    with contextlib.suppress(OSError):
        commit = (home / "refs" / "main").read_text("utf-8").strip()
        if _COMMIT.fullmatch(commit) and (home / _SNAPSHOTS / commit).is_dir():
            return home / _SNAPSHOTS / commit
    commits = sorted((home / _SNAPSHOTS).iterdir())
    if len(commits) != 1:
        names = ", ".join(commit.name[:12] for commit in commits) or "nothing"
        raise ModelFileError(home, f"name one of its {_SNAPSHOTS}, which has {names}")
    return commits[0]


def _read_file(reader: CheckpointReader, path: Path, cache_root: Path | None) -> ModelPlace:
    root = absolute_user_path(cache_root or default_cache_root())
    name = path.resolve().stem
    digest = hash_files([path], root / MEMO_FILE)[path].sha256
    kind, versions = path.suffix[1:], {}
    for library in reader.LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[library] = importlib.metadata.version(library)
    code = own_code().of(*entry_modules(DOOR, [kind]))
    cache = StageCache(root, name)

    def build(folder: Path) -> None:
        with working(f"read {path.name}"):
            reader.write_checkpoint(path, folder / name)

    key = StageKey(kind, {"name": name}, (digest,), versions, code)
    entry = cache.get_or_build(key, path, build, subject=path.name)
    return ModelPlace(entry.folder / name, name, path, cache)


def _download(model: str, path: Path, revision: str | None) -> Path:
    """Download a model of the hub, unless its files are here already.

    Args:
        path: that `model` would have on this machine. With a revision it is an id in any case.
    """
    match = _HUB_ID.fullmatch(model)
    is_id = match is not None and bool(revision or match[2])
    is_path = path.parent.is_dir() or path.suffix in _FILE_SUFFIXES
    if match is None or (is_path and not is_id):
        reason = "there is no such file or folder"
        if match is not None and path.suffix not in _FILE_SUFFIXES:
            reason += f"; {model}@main would be a model of the Hugging Face hub"
        raise ModelFileError(Path(ascii(model)[1:-1]), reason)
    repository, named = match[1], match[2]
    revision = revision or named
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        at = f" --revision {revision}" if revision else ""
        target = repository.partition("/")[2]
        raise ModelFileError(
            Path(model),
            "there is no such folder. If it is a model of the Hugging Face hub, `hf download "
            f"{repository}{at} --local-dir {target}` brings it; with `pip install qnnfarm[hub]` "
            "this command does so itself",
        ) from None
    try:
        folder = snapshot_download(repository, revision=revision, allow_patterns=list(_FILES))
    except Exception as error:  # the library raises its own kinds, and those of its transport
        reason = f"there is no such folder, and the Hugging Face hub did not give it: {error}"
        raise ModelFileError(Path(model), reason) from error
    return Path(folder)
