"""Registration on a backend of C that writes down what it is asked, in its order."""

import subprocess
import sys
from pathlib import Path

import pytest

from device_scripts import register_op_packages
from tests.buildlib.op_packages import build_library

CHECKOUT = Path(__file__).parents[2]
BACKEND = """
typedef unsigned long Error;
extern int dprintf(int, const char *, ...);
typedef struct { unsigned id; const char *name; unsigned core[3], own[3]; void *fn[80]; } Interface;
static Error log_create(void *f, unsigned level, void **made) { *made = (void *)1; return 0; }
static Error create(void *log, void *config, void **made) {
  dprintf(1, "backend\\n"); *made = (void *)2; return 0;
}
static Error add(void *backend, const char *path, const char *provider, const char *target) {
  dprintf(1, "%s %s %s\\n", path, provider, target);
  return provider[0] == 'X' ? 4006 : 0;
}
static Interface table = {
  6, "fake", {2, 40, 0}, {5, 51, 0}, {[1] = create, [5] = add, [25] = log_create}
};
static Interface *tables[] = {&table};
Error QnnInterface_getProviders(Interface ***list, unsigned *count) {
  *list = tables; *count = 1; return 0;
}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder with a backend, and a runner that prints its arguments."""
    build_library(tmp_path / "libQnnHtp.so", BACKEND)
    runner = "import sys\nprint(__name__, sys.argv)\nsys.exit(7)\n"
    (tmp_path / "runner.py").write_text(runner)
    return tmp_path


def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    script = register_op_packages.__file__
    environment = {"PYTHONPATH": str(CHECKOUT), "LD_LIBRARY_PATH": str(folder)}
    return subprocess.run(
        [sys.executable, "-u", str(script), *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_mllms_package_is_registered_for_the_processor_first(folder: Path) -> None:
    """Names, provider and order of mllm's `QNNBackend.cpp` and `aot_execute.rst` (MIT)."""
    provider = "LLaMAPackageInterfaceProvider"
    packages = []
    for side in ("CPU", "HTP"):
        packages += ["--op-package", f"libQnnLLaMAPackage_{side}.so:{provider}:{side}"]
    done = run(folder, *packages, "runner.py", "-c", "config.json", "--op-package", "mine")
    assert done.stdout.splitlines() == [
        "backend",
        f"libQnnLLaMAPackage_CPU.so {provider} CPU",
        f"libQnnLLaMAPackage_HTP.so {provider} HTP",
        "__main__ ['runner.py', '-c', 'config.json', '--op-package', 'mine']",
    ]
    assert done.returncode == 7


def test_the_runner_does_not_start_without_its_package(folder: Path) -> None:
    done = run(folder, "--op-package", "libX.so:XProvider", "runner.py")
    assert done.stdout.splitlines() == ["backend", "libX.so XProvider CPU"]
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "libX.so" in done.stderr
    assert "'XProvider'" in done.stderr


@pytest.mark.parametrize("text", ["", "a", "a:", ":b", "a:b:", "a:b:c:d"])
def test_what_is_no_package(folder: Path, text: str) -> None:
    done = run(folder, "--op-package", text, "runner.py")
    assert (done.returncode, done.stdout) == (2, "")
