"""What others get of a container, parts in sub-folders, and disks that are full."""

import dataclasses
import hashlib
import subprocess
import sys
import time
import zipfile
from io import FileIO
from pathlib import Path

import pytest

from buildlib.container.container import GenAIContainer
from buildlib.container.writer import ContainerContents, ContainerFile, write_container
from buildlib.errors import ContainerError

BUNDLE = {
    "genie_config.json",
    "htp_backend_ext_config.json",
    "tokenizer.json",
    "tiny_part_1_of_2.bin",
    "tiny_part_2_of_2.bin",
    "embedding_weights.raw",
    "adapters/poet/lora_a.raw",
}


@pytest.fixture
def container(draft: ContainerContents, tmp_path: Path) -> GenAIContainer:
    table, adapter = tmp_path / "table", tmp_path / "adapter"
    table.write_bytes(b"t" * 3000)
    adapter.write_bytes(b"a" * 100)
    extras = {
        "embedding_weights.raw": ContainerFile(table, "embedding"),
        "adapters/poet/lora_a.raw": ContainerFile(adapter, "lora"),
    }
    full = dataclasses.replace(draft, extras=extras)
    return write_container(full, tmp_path / "container", validate=lambda _: None)


def files_in(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def test_parts_beside_the_binaries(container: GenAIContainer, tmp_path: Path) -> None:
    loaded = GenAIContainer.load(container.path)
    assert set(loaded.files) == BUNDLE
    assert loaded.sizes_by_kind["lora"] == 100
    assert list(loaded.sizes_by_kind)[:2] == ["binary", "embedding"]
    saved = loaded.save(tmp_path / "copy")
    assert files_in(saved.path) == files_in(container.path)
    (container.path / "adapters/poet/lora_a.raw").write_bytes(b"b" * 100)
    with pytest.raises(ContainerError, match="adapters/poet"):
        GenAIContainer.load(container.path)


def test_a_part_under_a_bad_name_is_refused(draft: ContainerContents, tmp_path: Path) -> None:
    for name in ("../evil", "tokenizer.json", "tokenizer.json/below", "metadata.json"):
        bad = dataclasses.replace(draft, extras={name: ContainerFile(draft.tokenizer, "lora")})
        with pytest.raises(ContainerError):
            write_container(bad, tmp_path / "container", validate=lambda _: None)
    assert not (tmp_path / "container").exists()


def test_a_bundle_for_others(container: GenAIContainer, tmp_path: Path) -> None:
    bundle = container.export(tmp_path / "out" / "genie_bundle")
    kept = files_in(container.path)
    del kept["metadata.json"]
    assert files_in(bundle) == kept
    assert set(kept) == BUNDLE
    with pytest.raises(ContainerError, match="is there already"):
        container.export(bundle)


def test_an_archive_is_the_bundle_in_equal_bytes(container: GenAIContainer, tmp_path: Path) -> None:
    first = container.export(tmp_path / "a", "zip")
    time.sleep(0.01)
    second = container.save(tmp_path / "copy").export(tmp_path / "b" / "tiny.genie.zip", "zip")
    assert first == tmp_path / "a" / "tiny.genie.zip"
    assert first.read_bytes() == second.read_bytes()
    unpacked = tmp_path / "unpacked"
    with zipfile.ZipFile(first) as archive:
        assert archive.testzip() is None
        archive.extractall(unpacked)
    bundle = container.export(tmp_path / "bundle")
    assert files_in(unpacked / "tiny") == files_in(bundle)
    assert [path.name for path in first.parent.iterdir()] == ["tiny.genie.zip"]
    with pytest.raises(ContainerError, match="there already"):
        container.export(second, "zip")
    assert first.read_bytes() == second.read_bytes()


def test_loading_reads_unchanged_files_once(
    container: GenAIContainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    read = hashlib.file_digest

    def counted(file: FileIO, name: str) -> object:
        reads.append(Path(str(file.name)).name)
        return read(file, name)

    monkeypatch.setattr(hashlib, "file_digest", counted)
    GenAIContainer.load(container.path)
    assert [name for name in reads if not name.endswith("config.json")] == []
    reads.clear()  # who wrote the parts has hashed them
    with (container.path / "tiny_part_1_of_2.bin").open("r+b") as file:
        file.write(b"x")
    with pytest.raises(ContainerError, match="has changed"):
        GenAIContainer.load(container.path)
    assert "tiny_part_1_of_2.bin" in reads
    GenAIContainer.load(container.path, verify=False)


_FULL = """
import resource, sys
from pathlib import Path
from buildlib.container.container import GenAIContainer
from buildlib.errors import ContainerError
container = GenAIContainer.load(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (15_000, 15_000))
for work in (
    lambda: container.save(sys.argv[2] + "/saved"),
    lambda: container.export(sys.argv[2] + "/bundle"),
    lambda: container.export(sys.argv[2], "zip"),
):
    try:
        work()
    except ContainerError as error:
        print(error)
"""


def test_a_full_disk_leaves_nothing_half_written(container: GenAIContainer, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-c", _FULL, str(container.path), str(out)],
        capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert all("cannot be written (File too large)" in line for line in lines)
    assert list(out.iterdir()) == []
