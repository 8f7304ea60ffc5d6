"""The stages behind a container in the cache layout of the vendor's Gen AI Builder, by links.

    <dest>/<model>/arcl_<32 hex>/         ar1_cl4096.onnx, ar128_cl4096.onnx, and their weights
    <dest>/<model>/transform_<32 hex>/    a folder for each part: <part>.onnx, .data, .encodings
    <dest>/<model>/convert_<32 hex>/      <part>.dlc
    <dest>/<model>/compile_<32 hex>/      <part>.bin, <part>_cache_info.json

Each has a `builder_cache_info.json`, whose configuration is strings. Layout: "Gen AI Builder
Overview", docs.qualcomm.com 80-87189-2. The cache here has an entry for each shape where that has
one for all, so those of `arcl` and `transform` are put together, under a hash over theirs.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC
from pathlib import Path
from typing import Annotated, Any

import onnx
import typer

from buildlib.cache.layout import FILES, LAST_USED, SIDECAR, CacheEntry, entry_name
from buildlib.cache.records import EntryInfo, read_files, read_info
from buildlib.checkpoint.layout import ENCODINGS_FILE, MODEL_FILE
from buildlib.container.container import GenAIContainer
from buildlib.errors import CacheError, ContainerError
from buildlib.files import atomic_folder, sync_file
from buildlib.graph.files import link_into, load_proto
from buildlib.paths import default_cache_root, user_path
from buildlib.replay import compile_entry, entry_beside
from harness.cli.cache import Root
from harness.console import answers

_RECORDS = {SIDECAR, FILES, LAST_USED}


def qairt_layout(
    container: Annotated[Path, typer.Argument(help="The container whose stages are meant.")],
    dest: Annotated[Path, typer.Argument(help="A new folder.")],
    cache: Root = None,
) -> None:
    """Lay out the stages of a container as the vendor's builder keeps them, by links.

    Tools and scripts that walk that tree find ONNX, encodings, DLCs and binaries where its
    documents say.

    Example: qnnfarm qairt-layout CONTAINER stages
    """
    made = export_cache(GenAIContainer.load(container), dest, cache_root=cache)
    for folder in sorted(made.glob("*/*")):
        answers().print(str(folder))


def export_cache(
    container: GenAIContainer,
    dest: str | os.PathLike[str],
    *,
    cache_root: str | os.PathLike[str] | None = None,
) -> Path:
    """Lay out the entries of the cache that a container was compiled from, as documented.

    Large files are links. A context binary has the name of its first graph; its sidecar names all.

    Args:
        dest: a new folder.
        cache_root: of the build that made the container.

    Raises:
        CacheError: the cache does not have what a binary was compiled from.
        ContainerError: the folder exists, or cannot be written.
    """
    root = default_cache_root() if cache_root is None else user_path(cache_root)
    target = user_path(dest)
    compiled = [
        compile_entry(root, name, container.metadata.files[name].sha256)
        for name in container.genie_config.ctx_bins
    ]
    if target.exists():
        raise ContainerError(str(target), "it exists already; name a new folder")
    builds: dict[str, _Build] = {}
    for binary in compiled:
        converted = [entry_beside(binary, digest) for digest in read_files(binary).sources]
        for entry in converted:  # those of an attached model have a folder of their own
            builds.setdefault(entry.folder.parent.name, _Build()).converted.append(entry)
        builds[converted[0].folder.parent.name].compiled.append((binary, converted))
    with atomic_folder(target) as folder:
        for group, build in builds.items():
            name = _model_name(build.converted[0]) if build.compiled else group
            _Layout(folder / name, target / name).write(build)
        _sync(folder)
    return target


@dataclass
class _Build:
    """Entries of one model: of `convert`, and of `compile` with the entries that each reads."""

    converted: list[CacheEntry] = field(default_factory=list)
    compiled: list[tuple[Path, list[CacheEntry]]] = field(default_factory=list)


@dataclass(frozen=True)
class _Layout:
    """The folder of a model that is being written, and its place in the end."""

    folder: Path
    place: Path

    def write(self, build: _Build) -> None:
        """Write all stages, from `arcl` on."""
        transformed = {each.hash: _before(each, "transform") for each in build.converted}
        splits = list({entry.hash: entry for entry in transformed.values()}.values())
        shapes = [_before(entry, "arcl") for entry in splits]
        arcl = self._merge("arcl", shapes, read_info(shapes[0].folder).source)
        for entry in shapes:
            _link_shape(entry.folder, arcl, read_files(entry.folder).subject)
        first = f"{read_files(shapes[0].folder).subject}.onnx"
        transform = self._merge("transform", splits, self._final(arcl / first))
        for entry in splits:
            for part in entry.folder.glob("*.onnx"):
                _link_part(part, transform / part.stem)
        dlcs = {}
        for entry in build.converted:
            name = read_files(entry.folder).subject
            place = self.folder / entry.folder.name
            dlcs[entry.hash] = link_into(entry.folder / f"{name}.dlc", _made(place))
            source = self._final(transform / name / f"{name}.onnx")
            info = read_info(entry.folder)
            self._describe(place, info, info.hash, source, info.config)
        for binary, converted in build.compiled:
            names = [read_files(entry.folder).subject for entry in converted]
            place = _made(self.folder / binary.name)
            for file in (*binary.glob("*.bin"), *binary.glob("*_cache_info.json")):
                if file.name != SIDECAR:
                    ending = ".bin" if file.suffix == ".bin" else "_cache_info.json"
                    link_into(file, place, f"{names[0]}{ending}")
            info = read_info(binary)
            config = {**info.config, "graph_names": names}
            self._describe(place, info, info.hash, self._final(dlcs[converted[0].hash]), config)

    def _merge(self, operation: str, entries: Sequence[CacheEntry], source: str) -> Path:
        """Make the folder of entries that differ in their shape alone, with their sidecar."""
        infos = [read_info(entry.folder) for entry in entries]
        digest = hashlib.sha256("".join(info.hash for info in infos).encode()).hexdigest()
        configs = [info.config for info in infos]
        config = {
            key: value if all(one[key] == value for one in configs) else [c[key] for c in configs]
            for key, value in configs[0].items()
        }
        place = _made(self.folder / entry_name(operation, digest))
        newest = max(infos, key=lambda info: info.created_at)
        self._describe(place, newest, digest, source, config)
        return place

    def _describe(
        self, place: Path, info: EntryInfo, digest: str, source: str, config: Mapping[str, Any]
    ) -> None:
        record = {
            "operation": info.operation,
            "source": source,
            "config": {key: _text(value) for key, value in config.items()},
            "hash": digest,
            "created_at": info.created_at.astimezone(UTC).isoformat(),
        }
        (place / SIDECAR).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

    def _final(self, path: Path) -> str:
        return str(self.place / path.relative_to(self.folder))


def _text(value: object) -> str:
    """Return a value of a configuration as a string, which `CompileConfig` reads again."""
    return json.dumps(value) if isinstance(value, list | dict) else str(value)


def _before(entry: CacheEntry, operation: str) -> CacheEntry:
    """Return the entry of a stage before another one.

    Raises:
        CacheError: there was no such stage, as of a draft head.
    """
    while not entry.folder.name.startswith(f"{operation}_"):
        if entry.operation in {"import", "load"}:
            raise CacheError(str(entry.folder), f"a binary was made of it without {operation}")
        entry = entry_beside(entry.folder, read_files(entry.folder).sources[0])
    return entry


def _model_name(entry: CacheEntry) -> str:
    """Return the stem of the model's file, or the name of a checkpoint's folder, as a slug."""
    while read_info(entry.folder).operation not in {"import", "load", "mllm"}:
        entry = entry_beside(entry.folder, read_files(entry.folder).sources[0])
    source = Path(read_info(entry.folder).source)
    name = source.stem if source.suffix == ".onnx" else source.name
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") or "model"


def _link_shape(entry: Path, into: Path, name: str) -> None:
    names = {MODEL_FILE: f"{name}.onnx", ENCODINGS_FILE: f"{name}.encodings"}
    for file in entry.iterdir():
        if file.name not in _RECORDS:
            link_into(file, into, names.get(file.name))


def _link_part(model: Path, into: Path) -> None:
    """Link a part's encodings and weights, and write its graph, which names these anew.

    Weights that lie in several files become `.data`, `.data2` and so on, the largest first.
    """
    link_into(model.with_suffix(".encodings"), _made(into))
    proto = load_proto(model)
    places = [
        entry
        for one in proto.graph.initializer
        for entry in one.external_data
        if entry.key == "location"
    ]
    files = sorted(
        {place.value for place in places},
        key=lambda name: (-(model.parent / name).stat().st_size, name),
    )
    names = {
        file: f"{model.stem}.data{number if number > 1 else ''}"
        for number, file in enumerate(files, 1)
    }
    for file, name in names.items():
        link_into(model.parent / file, into, name)
    for place in places:
        place.value = names[place.value]
    onnx.save(proto, into / model.name)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _sync(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.suffix in {".json", ".onnx"}:
            sync_file(file)
