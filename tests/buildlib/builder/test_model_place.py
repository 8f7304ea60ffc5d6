"""Folders of the hub's cache, as its client leaves them: links from a commit to blobs."""

from pathlib import Path

import pytest

from buildlib.builder.model_place import find_model
from buildlib.errors import ModelFileError

MAIN, OTHER = "c1899de2" * 5, "0f5a1e77" * 5


def snapshot(home: Path, commit: str, model: Path) -> Path:
    folder = home / "snapshots" / commit
    folder.mkdir(parents=True)
    (home / "blobs").mkdir(exist_ok=True)
    for file in (file for file in model.iterdir() if file.suffix in {".json", ".safetensors"}):
        blob = home / "blobs" / f"{commit}-{file.name}"
        blob.write_bytes(file.read_bytes())
        (folder / file.name).symlink_to(Path("../../blobs") / blob.name)
    return folder


@pytest.mark.parametrize("named", [None, "main", "absent"])
def test_the_folder_of_a_model_in_the_cache_of_the_hub(
    tiny: Path, tmp_path: Path, named: str | None
) -> None:
    home = tmp_path / "models--acme--tiny-1.1M"
    main = snapshot(home, MAIN, tiny)
    if named:
        (home / "refs").mkdir()
        (home / "refs" / "main").write_text(MAIN if named == "main" else "f" * 40)
    assert find_model(home).path == main
    assert find_model(home).name == find_model(main).name == "tiny-1.1M"
    snapshot(home, OTHER, tiny)
    if named == "main":
        assert find_model(home).path == main
        return
    with pytest.raises(ModelFileError, match=f"one of its snapshots, which has {OTHER[:12]}, "):
        find_model(home)


def test_a_revision_of_a_folder_is_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="'main' is of a model of the hub"):
        find_model(tiny, revision="main")
    main = snapshot(tmp_path / "models--acme--tiny", MAIN, tiny)  # as a pipeline is opened again
    assert find_model(main, revision="main").path == main
