"""This machine as a device: what no other machine can do wrong in its place."""

import os
import shutil
from pathlib import Path

import pytest

from harness.devices.device import Device
from harness.devices.local import LocalTransport
from harness.errors import DeviceTimeoutError, DeviceUnsupportedError


def test_finding_the_work_root_is_within_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "mkdir").write_text("#!/bin/sh\nexec sleep 60\n")
    (tools / "mkdir").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    with pytest.raises(DeviceTimeoutError) as caught:
        Device(LocalTransport()).free_bytes(timeout_s=1)
    assert caught.value.timeout_s <= 1


def test_free_space_where_df_takes_pedantic_for_half_a_kib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of Android 12 takes `-kP`, but not `-Pk`."""
    df = f"{shutil.which('df')}"
    (tmp_path / "df").write_text(
        f'#!/bin/sh\ncase $1 in -kP) shift; exec {df} -P -B512 "$@" ;; esac\nexec {df} "$@"\n'
    )
    (tmp_path / "df").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    free = Device(LocalTransport()).free_bytes()
    assert free is not None
    assert free < 1.5 * shutil.disk_usage(tmp_path).free


def test_this_machine_is_not_rebooted() -> None:
    with pytest.raises(DeviceUnsupportedError, match="this program runs on it"):
        Device(LocalTransport()).reboot()
