import ctypes
import importlib.util
import platform
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from buildlib.errors import ToolchainMissingError
from buildlib.toolchains.ort_qnn.wheel import find_libraries
from buildlib.toolchains.qnn import structures as qnn_types


def test_wheel_is_found_without_importing_it() -> None:
    code = (
        "import sys; from buildlib.toolchains.ort_qnn.wheel import find_libraries;"
        "find_libraries();"
        "sys.exit('onnxruntime_qnn' in sys.modules or 'onnxruntime' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=200).returncode == 0


def test_a_machine_or_a_wheel_that_does_not_do_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spec = ModuleSpec("onnxruntime_qnn", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    (tmp_path / "libQnnHtp.so").touch()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: spec)
    with pytest.raises(ToolchainMissingError, match=r"lacks libQnnSystem\.so") as caught:
        find_libraries()
    assert "libQnnHtp.so" not in str(caught.value)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ToolchainMissingError, match="not installed"):
        find_libraries()
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(ToolchainMissingError, match="Linux on x86_64"):
        find_libraries()


def test_structures_have_the_size_of_the_libraries() -> None:
    sizes: dict[type[ctypes.Structure], int] = {
        qnn_types.BackendInterfaceHeader: 40,
        qnn_types.SystemInterfaceHeader: 32,
        qnn_types.QuantizeParams: 40,
        qnn_types.QnnTensor: 144,
        qnn_types.GraphInfoV3: 88,
    }
    assert {structure: ctypes.sizeof(structure) for structure in sizes} == sizes


@pytest.mark.needs("libatomic1")
@pytest.mark.parametrize(
    ("change", "call", "said"),
    [
        ("api.BACKEND_TABLE_ENTRIES.clear()", "load_backend(find_libraries().htp)", "core API 2."),
        ("api.SYSTEM_API_MINORS = range(90, 91)", "load_system(find_libraries().system)", "1.90"),
        ("", "load_backend(find_libraries().ir.with_name('libQnnSystem.so'))", "cannot load"),
    ],
)
def test_unknown_interfaces_are_refused(change: str, call: str, said: str) -> None:
    code = f"""
import buildlib.toolchains.qnn.api as api
from buildlib.toolchains.qnn.refusal import RefusedError
from buildlib.toolchains.ort_qnn.wheel import find_libraries
{change}
try:
    api.{call}
except RefusedError as error:
    print(error)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert said in result.stdout
