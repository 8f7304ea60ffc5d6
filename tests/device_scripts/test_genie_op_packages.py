"""Registration on a backend of C that writes down what it is asked, in its order."""

import subprocess
import sys
from pathlib import Path

import pytest

from device_scripts import genie_api
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


PROGRAM = """
from device_scripts import genie_api
try:
    genie_api.Genie("libc.so.6")
except genie_api.FatalError as error:
    print("refused:", error)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build_library(tmp_path / "libQnnHtp.so", BACKEND)
    return tmp_path


def load_genie(folder: Path, packages: str) -> list[str]:
    """Load a Genie that is none in a run folder, and return what is printed."""
    environment = {
        "PYTHONPATH": str(CHECKOUT),
        "LD_LIBRARY_PATH": str(folder),
        genie_api.OP_PACKAGES: packages,
    }
    done = subprocess.run(
        [sys.executable, "-u", "-c", PROGRAM],
        cwd=folder, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()


def test_mllms_package_is_registered_for_the_processor_first(folder: Path) -> None:
    """Names, provider and order of mllm's `QNNBackend.cpp` and `aot_execute.rst` (MIT)."""
    provider = "LLaMAPackageInterfaceProvider"
    names = {side: f"libQnnLLaMAPackage_{side}.so" for side in ("CPU", "HTP")}
    packages = " ".join(f"{name}:{provider}:{side}" for side, name in names.items())
    assert load_genie(folder, packages) == [
        "backend",
        f"libQnnLLaMAPackage_CPU.so {provider} CPU",
        f"libQnnLLaMAPackage_HTP.so {provider} HTP",
    ]


def test_without_packages_no_backend_is_opened(folder: Path) -> None:
    assert load_genie(folder, "") == []


@pytest.mark.parametrize("package", ["libX.so:XProvider:CPU", "libX.so:Y", "a:b:c:d"])
def test_a_package_that_is_refused_is_named(folder: Path, package: str) -> None:
    last = load_genie(folder, package)[-1]
    assert last.startswith(f"refused: cannot register op package {package}: ")
