"""Dialogs of the real Genie on the emulator, with the trained model built in one part."""

import shutil
from pathlib import Path

import pytest

from buildlib.builder.stages.export import export_checkpoint
from buildlib.container.genie_config import GenieConfig
from buildlib.graph.shape import GraphShape
from tests.buildlib.dialogs.genie_lab import GenieLab
from tests.conftest import made_once
from tests.system import needs

ANSWER = "answer.txt"


@pytest.fixture(scope="session")
def genie_lab(trained: Path, build_cache: Path) -> GenieLab:
    """The trained model, exported."""
    needs("libatomic1")

    def export(folder: Path) -> None:
        text = (trained / "text" / "calibration.txt").read_text()
        export_checkpoint(trained, text, folder, GraphShape(32, 192))

    return GenieLab(made_once(build_cache.with_name("genie-lab"), export))


@pytest.fixture(scope="session")
def plain_dialog(
    genie_lab: GenieLab, build_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, GenieConfig]:
    """The trained model as it is, compiled: a folder of its worker, and its configuration."""

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
