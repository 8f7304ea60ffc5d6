"""The suite of adapters, as users run it, on a container with both of the reference model's."""

from pathlib import Path

import pytest

from buildlib.builder.lora_config import LoraBuilderInputConfig
from harness.devices.device import Device
from suites.models import tiny_llama
from suites.models.tiny_llama import lora
from tests.builders import builder_for
from tests.suites.user_pytest import run_pytest


@pytest.mark.slow
@pytest.mark.needs("plugins.lora")
def test_each_adapter_does_what_it_was_trained_for(
    build_cache: Path, virtual_device: Device, tmp_path: Path
) -> None:
    builder = builder_for(tiny_llama.folder(), build_cache, splits=None)
    builder.lora_config = LoraBuilderInputConfig(
        lora_config_path=lora.folder() / "lora_config.yaml", quant_updatable_mode="all"
    )
    container = builder.build()
    done = run_pytest(
        tmp_path, "--pyargs", "plugins.lora.test_suite", f"--device={virtual_device.serial}",
        f"--container={container.path}", "--suite-param=windows=1",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout, done.stdout
