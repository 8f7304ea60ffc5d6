"""`--lab` where no lab is installed."""

from importlib.metadata import EntryPoint, EntryPoints

import pytest

from buildlib import entry_points
from harness.errors import WrongUseError
from harness.plans.lab import find_lab


@pytest.mark.parametrize(
    ("values", "missing"), [((), "plugin `lab`"), (("procrastinat:open_lab",), "procrastinat")]
)
def test_lab_without_its_plugin_or_its_extra_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch, values: tuple[str, ...], missing: str
) -> None:
    there = EntryPoints(EntryPoint("lab", value, "qnnfarm.labs") for value in values)
    monkeypatch.setattr(entry_points, "installed", lambda _: there)
    with pytest.raises(WrongUseError, match=rf"{missing}: pip install 'qnnfarm\[lab\]'"):
        find_lab()
