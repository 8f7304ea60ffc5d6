"""Op packages in the real HTP compiler: the one in C of `suites`, built here, and damaged ones."""

from pathlib import Path

import numpy as np
import pytest

from buildlib.errors import ToolchainError
from buildlib.targets import find_soc
from buildlib.toolchains.base import OpPackageLibrary
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain
from plugins.diagnosis.operation import run_operation
from tests.buildlib.op_packages import PROVIDER, SCALE, build_package

SOC = find_soc("SM8750")
OPERATION = "qnnfarm.scale::Scale"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> OpPackageLibrary:
    library = tmp_path_factory.mktemp("package") / "libScale_CPU.so"
    return OpPackageLibrary(build_package(library), PROVIDER)


def test_operations_of_a_package_become_known_or_it_is_refused(
    package: OpPackageLibrary, tmp_path: Path
) -> None:
    toolchain, no_library = OrtQnnToolchain(), tmp_path / "libScale_CPU.so"
    assert toolchain.op_package(package) == (OPERATION,)
    no_library.write_text("no ELF")
    for library, provider, said in (
        (package.library, "Missing", "no function 'Missing'"),
        (no_library, PROVIDER, "BACKEND_REGISTER_OP_PACKAGE"),
    ):
        with pytest.raises(ToolchainError, match=said):
            toolchain.op_package(OpPackageLibrary(library, provider))


@pytest.mark.parametrize(("factor", "least"), [(3, 0.0), (2, 1000.0)])
def test_a_kernel_computes_its_formula_and_no_other(
    package: OpPackageLibrary, factor: int, least: float
) -> None:
    inputs = {"x": np.random.default_rng(1).uniform(-2, 5, (3, 5))}
    done = run_operation(
        package, OPERATION, inputs, lambda real: [factor * real["x"] + 1], dtype="uint16", soc=SOC
    )
    assert np.ptp(done.outputs[0]) > 3
    assert least <= done.steps[0]
    assert least or done.steps[0] <= 0.5 + 1e-6  # the kernel rounds to the nearest


def test_a_package_without_a_kernel_registers_and_cannot_be_compiled(tmp_path: Path) -> None:
    source = SCALE.read_text().replace("qhpi_register_ops_v1(1, &OPERATION, PACKAGE);", "")
    library = OpPackageLibrary(build_package(tmp_path / "libX_CPU.so", source), PROVIDER)
    assert OrtQnnToolchain().op_package(library) == (OPERATION,)
    inputs = {"x": np.ones((1, 1, 2, 32))}
    with pytest.raises(ToolchainError, match="no kernel of the package"):
        run_operation(library, OPERATION, inputs, lambda real: [real["x"]], dtype="uint16", soc=SOC)
