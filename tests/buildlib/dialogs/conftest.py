"""Dialogs of the real Genie on the emulator, with the tiny model built in one part."""

import shutil
from pathlib import Path

import pytest

from buildlib.container.genie_config import GenieConfig
from tests.buildlib.dialogs.genie_lab import GenieLab
from tests.conftest import made_once
from tests.system import needs

ANSWER = "answer.txt"


@pytest.fixture(scope="session")
def genie_lab(tiny_export: Path, tiny_text: str) -> GenieLab:
    """The tiny model, exported."""
    needs("libatomic1")
    return GenieLab(tiny_export, tiny_text[:12])


@pytest.fixture(scope="session")
def plain_dialog(
    genie_lab: GenieLab, build_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, GenieConfig]:
    """The tiny model as it is, compiled: a folder of its worker, and its configuration."""

    def build(folder: Path) -> None:
        folder.mkdir()
        config = genie_lab.compile(genie_lab.export / "model.onnx", folder)
        (folder / ANSWER).write_text(genie_lab.ask(folder, config))

    built = made_once(build_cache.with_name("plain-dialog"), build)
    folder = tmp_path_factory.mktemp("plain")
    skip = shutil.ignore_patterns("*.onnx", "*.dlc", "*.safetensors", "*.encodings")
    shutil.copytree(built, folder, ignore=skip, dirs_exist_ok=True)
    config = GenieConfig.model_validate_json((folder / "genie_config.json").read_text())
    return folder, config


@pytest.fixture(scope="session")
def plain_answer(plain_dialog: tuple[Path, GenieConfig]) -> str:
    """What Genie answers in the plain dialog."""
    return (plain_dialog[0] / ANSWER).read_text()
