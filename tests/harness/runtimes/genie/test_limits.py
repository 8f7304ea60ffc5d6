"""A configuration that cannot run is refused before a device is asked for."""

import json
from pathlib import Path

import pytest

from buildlib.container.container import GenAIContainer
from buildlib.container.genie_config import GenieConfig
from harness.errors import NO_ANSWER, WrongUseError
from harness.runtimes.container_model import open_container
from harness.runtimes.dialog_settings import DialogSettings
from harness.runtimes.genie.runtime import config_of
from tests import command_line
from tests.repackaged import repackage


@pytest.fixture
def direct(tiny_bundle: Path, tmp_path: Path) -> Path:
    """The reference model's container, with a configuration that asks for direct-io."""
    plain = GenAIContainer.load(tiny_bundle)
    values = json.loads(plain.genie_config.to_json())
    values["dialog"]["engine"]["backend"]["QnnHtp"]["direct-io"] = True
    return repackage(plain, GenieConfig.model_validate(values), tmp_path / "direct").path


@pytest.mark.needs("plugins.virtual_android")
def test_it_is_refused_by_its_pointer(direct: Path) -> None:
    with pytest.raises(WrongUseError, match="/dialog/engine/backend/QnnHtp/direct-io"):
        open_container(direct)
    done = command_line.qnnfarm(
        "generate", direct, "--prompt", "In", "--device", "virtual:none", cwd=direct
    )
    assert done.returncode == NO_ANSWER
    assert "direct-io fails on the emulator" in done.stderr  # and nobody looked for the device


def test_another_configuration_for_a_container_has_the_same_limits(
    direct: Path, tiny_bundle: Path
) -> None:
    container = open_container(tiny_bundle)
    settings = DialogSettings(genie_config=str(direct / "genie_config.json"))
    with pytest.raises(WrongUseError, match=r"genie_config\.json cannot run: .*direct-io"):
        config_of(settings, container)
