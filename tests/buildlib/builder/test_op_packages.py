"""A model with an operation of an op package: from its ONNX to containers that need the package."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from buildlib.builder.canonical import ImportModel
from buildlib.builder_options import apply_options
from buildlib.checkpoint.layout import MODEL_FILE
from buildlib.errors import ModelFileError, ToolchainError
from buildlib.genai import GenAIBuilderHTP
from buildlib.graph.files import load_model
from buildlib.numerics.verifier import VerifyOptions
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain
from tests.builders import builder_for
from tests.buildlib.op_packages import (
    PROVIDER,
    build_library,
    build_package,
    scale_logits,
)

OPERATION = "qnnfarm.scale::Scale"


@pytest.fixture(scope="module")
def export(one_layer_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export whose logits are 3 x + 1 by the example's operation."""
    folder = tmp_path_factory.mktemp("scaled") / "scaled"
    shutil.copytree(one_layer_export, folder)
    scale_logits(folder)
    return folder


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The example for this host, and libraries that are none for a phone."""
    folder = tmp_path_factory.mktemp("libraries")
    source = f"int {PROVIDER}(void *x) {{ return 0; }}"
    made = {
        "x86_64": build_package(folder / "x86_64.so"),
        "aarch64-android": build_library(folder / "android.so", source, machine="aarch64"),
        "hexagon-v79": build_library(folder / "v79.so", source, machine="hexagon", flags=0x79),
    }
    return {target: str(path) for target, path in made.items()}


@pytest.fixture
def builder(
    export: Path, targets: dict[str, str], tiny_text: str, build_cache: Path
) -> GenAIBuilderHTP:
    made = builder_for(export, build_cache, [1], [96], text=tiny_text)
    entry = {"name": "Scale", "interface_provider": PROVIDER, "targets": targets}
    apply_options(made, {"op_packages": [entry]})
    return made


def test_each_stage_computes_what_the_functions_of_the_source_do(builder: GenAIBuilderHTP) -> None:
    """ONNX Runtime runs the function of the source, and the emulator the kernel in C."""
    builder.set_targets(["SM8750:emulator"])
    report = builder.verify(VerifyOptions(max_positions=24, continuation=2), emulator=True)
    assert report.passed, report.failures
    assert {one.side for one in report.rows} >= {"import", "quantize", "compile"}
    assert min(one.found.sqnr_db for one in report.rows if one.side == "compile") > 30


def test_the_binary_needs_the_package_of_its_container(builder: GenAIBuilderHTP) -> None:
    container = builder.set_targets(["SM8750:emulator"]).build()
    (binary,) = [path for name, path in container.files.items() if name.endswith(".bin")]
    graph = OrtQnnToolchain().inspect(binary).graphs[0]
    inputs = {tensor.name: np.zeros(tensor.shape, tensor.dtype) for tensor in graph.inputs}
    with pytest.raises(ToolchainError, match="op package that has it is not registered"):
        OrtQnnToolchain().execute(binary, graph.name, inputs)
    assert "libScale_CPU.so" in container.files
    assert container.metadata.options["op_packages"] == (f"libScale_CPU.so:{PROVIDER}:CPU",)


@pytest.mark.parametrize(("operations", "last"), [((), "Add"), ((OPERATION,), "Scale")])
def test_a_function_is_inlined_unless_a_package_has_its_operation(
    export: Path, tmp_path: Path, operations: tuple[str, ...], last: str
) -> None:
    imported = ImportModel(operations=operations).run(export / MODEL_FILE, tmp_path / MODEL_FILE)
    graph = load_model(imported).graph
    (logits,) = [value for value in graph.outputs if value.name == "logits"]
    kinds = []
    while (node := logits.producer()) is not None and node.op_type not in {"Add", "Scale"}:
        kinds.append(node.op_type)
        (logits, *_) = [value for value in node.inputs if value is not None]
    assert node is not None
    assert (node.op_type, set(kinds)) == (last, {"Reshape"})


def without_function(model: onnx.ModelProto) -> None:
    del model.functions[:]


def with_attribute(model: onnx.ModelProto) -> None:
    (node,) = [node for node in model.graph.node if node.op_type == "Scale"]
    node.attribute.append(onnx.helper.make_attribute("alpha", 2.0))


@pytest.mark.parametrize(
    ("change", "reason"),
    [(without_function, "a function of the model"), (with_attribute, "need the QAIRT SDK")],
)
def test_operations_that_cannot_be_built_are_refused(
    export: Path, tmp_path: Path, change: Callable[[onnx.ModelProto], None], reason: str
) -> None:
    model = onnx.load(str(export / MODEL_FILE), load_external_data=False)
    change(model)
    source = export / f"{change.__name__}.onnx"  # beside its weights
    onnx.save(model, str(source))
    with pytest.raises(ModelFileError, match=reason):
        ImportModel(operations=[OPERATION]).run(source, tmp_path / MODEL_FILE)
