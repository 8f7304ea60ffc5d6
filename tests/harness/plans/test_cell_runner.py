"""Cells on devices, and the results database, which is made when there is something to keep."""

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from harness.devices.device import Device
from harness.errors import StoreUnavailableError
from harness.plans.cancellation import CancelToken
from harness.plans.cell_runner import DeviceCellRunner, ModelCache
from harness.plans.cells import Cell
from harness.pool.requirement import Requirement
from harness.results.store import LazyResultsStore, ResultsStore
from harness.workloads.command import Command

if TYPE_CHECKING:
    from harness.pool.lease import LeasedDevice


@pytest.mark.parametrize("form", ["{}", "sqlite:///{}"])
def test_it_is_made_when_it_is_written_to(tmp_path: Path, form: str) -> None:
    path = tmp_path / "results.db"
    with closing(LazyResultsStore(form.format(path))) as store:
        before = store.location
        assert store.existing is None
        assert not path.exists()
        assert store.open() is store.open()
        assert store.existing is not None
        assert path.exists()
        assert store.location == before
    with closing(LazyResultsStore(form.format(path))) as again:
        assert again.existing is not None
        assert again.location == before


def test_an_invalid_database_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    path.write_text("notes of mine")
    with pytest.raises(StoreUnavailableError):
        LazyResultsStore(str(path))


def test_a_command_costs_its_device_one_command(
    virtual_device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A farm of `sleep`s showed it: to read the properties took five times all other overhead."""
    commands: list[object] = []
    shell = Device.shell

    def count(self: Device, command: object, **options: object) -> object:
        commands.append(command)
        return shell(self, command, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Device, "shell", count)
    cell = Cell("0" * 64, "1" * 64, "true", Command(command=("true",)), Requirement())
    with ResultsStore.open(tmp_path / "results.db") as store:
        runner = DeviceCellRunner(store, ModelCache(), "run")
        runner.run(cell, cast("LeasedDevice", virtual_device), CancelToken())
    assert commands == [["env", "true"]]
