"""Op packages in the real HTP compiler: the one in C of `suites`, built here, and damaged ones."""

import subprocess
from pathlib import Path

import pytest

from buildlib.errors import ToolchainError
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain
from buildlib.toolchains.ort_qnn.wheel import find_libraries
from tests.system import program

SOURCE = Path(__file__).parents[3] / "suites/op_packages/scale/scale.c"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("package") / "libScale_CPU.so"
    link = ["-L", str(find_libraries().folder), "-l:libQnnHtp.so"]
    options = ["-shared", "-fPIC", "-O2", "-Wl,--allow-shlib-undefined"]
    gcc = str(program("gcc"))
    subprocess.run([gcc, *options, str(SOURCE), "-o", str(library), *link], check=True)
    return library


def test_the_operations_of_a_package_become_known(package: Path) -> None:
    assert OrtQnnToolchain().op_package(package, "ScaleProvider") == ("qnnfarm.scale::Scale",)


def test_a_provider_that_the_package_lacks(package: Path) -> None:
    with pytest.raises(ToolchainError, match="no function 'Missing'"):
        OrtQnnToolchain().op_package(package, "Missing")


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    library = tmp_path / "libScale_CPU.so"
    library.write_text("no ELF")
    with pytest.raises(ToolchainError, match="BACKEND_REGISTER_OP_PACKAGE"):
        OrtQnnToolchain().op_package(library, "ScaleProvider")
