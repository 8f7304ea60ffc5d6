"""Tab: what the shells are offered, and bash itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.devices.device import Device
from tests.harness.cli.conftest import Run


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("ben", ["bench"]),
        ("help perp", ["perplexity"]),
        ("pool undr", ["undrain"]),
        ("gate --baselin", ["--baseline"]),
        ("gate --metric prefill_tok", ["prefill_tokens_per_s"]),
        ("build m --recipe w4a16-m", ["w4a16-mixed"]),
        ("build m --target SM875", ["SM8750", "SM8750:emulator"]),
        ("build m --target SM8750 : em", ["emulator"]),
        ("build m --target SM8750 : emulator --rec", ["--recipe"]),
        ("device start n --soc SM845", ["SM8450"]),
        ("inspect no", []),
    ],
)
def test_what_tab_offers(qnnfarm: Run, line: str, offered: list[str]) -> None:
    """bash gives words apart at colons."""
    words = ["qnnfarm", *line.split()]
    variables = {
        "_QNNFARM_COMPLETE": "complete_bash",
        "_QNNFARM_COMPLETE_BEFORE": "",
        "COMP_WORDS": "\n".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    done = qnnfarm(**variables)
    assert done.stdout.split() == offered
    assert not done.stderr


@pytest.mark.variant
@pytest.mark.needs("bash")
def test_bash_completes_devices_and_containers(virtual_device: Device, tmp_path: Path) -> None:
    (tmp_path / "built" / "SM8750").mkdir(parents=True)
    (tmp_path / "built" / "SM8750" / "metadata.json").write_text("{}")
    script = """
    source <(_QNNFARM_COMPLETE=source_bash qnnfarm)
    tab() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _qnnfarm_completion qnnfarm
            echo "${COMPREPLY[@]}"; }
    tab qnnfarm bench buil
    tab qnnfarm bench container --device ''
    """
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], env=os.environ | {"PATH": path}, cwd=tmp_path,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    containers, devices = done.stdout.splitlines()
    assert containers == "built/SM8750"
    assert virtual_device.serial in devices.split()
