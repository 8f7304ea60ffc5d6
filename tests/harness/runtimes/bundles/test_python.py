"""A Python of the user's on a device: pushed, found by its runners, and refused in one line."""

import shutil
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from buildlib.container.container import GenAIContainer
from harness.devices.device import Device
from harness.errors import WrongUseError
from harness.runtimes.base import GenerationRequest, RuntimeOptions
from harness.runtimes.bundles.sources import VARIABLE, find_python
from harness.runtimes.genie.runtime import GenieRuntime

PACKAGES = {"collections", "ctypes", "encodings", "importlib", "json", "re", "urllib"}
"""What runners import of the standard library, beside its modules."""


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a prefix for x86_64: this interpreter, its library, and zipped modules."""
    folder = tmp_path_factory.mktemp("prefixes")
    lib, paths = folder / "x86_64" / "lib", sysconfig.get_paths()
    modules, version = Path(paths["stdlib"]), f"python{sys.version_info[0]}.{sys.version_info[1]}"
    (folder / "x86_64" / "bin").mkdir(parents=True)
    (folder / "x86_64" / "bin" / "python3").symlink_to(Path(sys._base_executable).resolve())  # type: ignore[attr-defined]
    shutil.copytree(modules / "lib-dynload", lib / version / "lib-dynload")
    with zipfile.ZipFile(lib / f"{version.replace('.', '')}.zip", "w") as archive:
        for path in modules.rglob("*.py"):
            below = path.relative_to(modules)
            if len(below.parts) == 1 or below.parts[0] in PACKAGES:
                archive.write(path, below)
    name = sysconfig.get_config_var("INSTSONAME")
    library = Path(sysconfig.get_config_var("LIBDIR")) / name
    if library.is_file():  # Debian's python3 has it built in, whatever its variables say
        (lib / name).symlink_to(library)
    return folder


@pytest.mark.variant
def test_runners_of_a_device_run_under_the_users_python(
    virtual_device: Device, small_bundle: Path, prefixes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(prefixes))
    container = GenAIContainer.load(small_bundle)
    runtime = GenieRuntime(virtual_device, virtual_device.properties(), container, RuntimeOptions())
    try:
        run_dir = runtime.prepare().run_dir
        which = "import ctypes, json, sys; print(sys.prefix, sys.version_info[:3])"
        said = virtual_device.shell(
            ["env", f"PATH={run_dir}:/system/bin:/usr/bin:/bin", "python3", "-c", which]
        ).stdout
        assert said.split(" ", 1)[0] == f"{run_dir}/python"
        assert str(tuple(sys.version_info[:3])) in said
        result = runtime.generate(GenerationRequest(3, prompt="In the beginning"))
    finally:
        runtime.clean()
    assert result.metrics["generated_tokens"] == 3


def test_a_folder_without_a_python_is_refused(tmp_path: Path) -> None:
    assert find_python("arm64-v8a", {}) == {}
    named = {VARIABLE: str(tmp_path)}
    assert find_python("arm64-v8a", named) == {}
    (tmp_path / "arm64-v8a" / "bin").mkdir(parents=True)
    with pytest.raises(WrongUseError, match="has no bin/python3"):
        find_python("arm64-v8a", named)


def test_what_no_runner_imports_stays_on_the_host(tmp_path: Path) -> None:
    prefix = tmp_path / "arm64-v8a"
    for name in (
        "bin/python3", "bin/pip", "include/Python.h", "lib/libpython3.12.so", "lib/libz.a",
        "lib/python3.12/json/__init__.py", "lib/python3.12/json/__pycache__/x.pyc",
        "lib/python3.12/test/test_x.py", "lib/python3.12/site-packages/pip/__init__.py",
    ):  # fmt: skip
        (prefix / name).parent.mkdir(parents=True, exist_ok=True)
        (prefix / name).touch()
    files = find_python("arm64-v8a", {VARIABLE: str(tmp_path)})
    assert set(files) == {
        "python3", "python/bin/python3", "python/lib/libpython3.12.so",
        "python/lib/python3.12/json/__init__.py",
    }  # fmt: skip
    assert [name for name, file in files.items() if file.executable] == [
        "python3", "python/bin/python3",
    ]  # fmt: skip
