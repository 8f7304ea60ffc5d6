"""The QAIRT SDK's toolchain, on a stand-in that enforces the documented command lines."""

import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from buildlib.errors import (
    InputFileError,
    InvalidOptionError,
    ToolchainError,
    ToolchainMissingError,
)
from buildlib.targets import parse_target
from buildlib.toolchains import registry
from buildlib.toolchains.base import GraphPorts, OpPackageLibrary
from buildlib.toolchains.compile_config import CompileConfig
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain
from buildlib.toolchains.registry import open_toolchain, sdk_root
from plugins.qairt.sdk import PYTHON_VARIABLE, QairtSdk
from plugins.qairt.toolchain import QairtToolchain, lowered_opset
from tests.plugins.qairt.qairt_sdk import calls, documented_flags, make_sdk, parse

PHONE = parse_target("SM8750")
NAMES = {1: "ar1_cl64_1_of_1", 32: "ar32_cl64_1_of_1"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sdk(tmp_path_factory.mktemp("qairt") / "2.39.0.250926")


@pytest.fixture(scope="module")
def qairt(root: Path) -> QairtToolchain:
    return QairtToolchain(QairtSdk.find(root))


@pytest.fixture(scope="module")
def made(
    models: dict[int, Path], qairt: QairtToolchain, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Both graphs as DLCs, in a folder whose name has a comma."""
    folder = tmp_path_factory.mktemp("a,b")
    for ar, model in models.items():
        qairt.convert(model, folder / f"{NAMES[ar]}.dlc", PHONE)
    return folder


def dlcs_of(made: Path) -> list[Path]:
    return [made / f"{name}.dlc" for name in NAMES.values()]


@pytest.fixture(scope="module")
def phone_binary(made: Path, qairt: QairtToolchain) -> Path:
    qairt.compile(dlcs_of(made), made / "phone.bin", CompileConfig.for_target(PHONE))
    return made / "phone.bin"


def test_its_binary_is_that_of_the_same_graphs_by_pypis_toolchain(
    phone_binary: Path, qairt: QairtToolchain, binary_for: Callable[[str], Path]
) -> None:
    assert phone_binary.read_bytes() == binary_for("SM8750").read_bytes()  # weights shared
    assert [graph.name for graph in qairt.inspect(phone_binary).graphs] == list(NAMES.values())


def test_logs_of_each_program_lie_beside_what_it_made(made: Path, root: Path) -> None:
    log = made / f"{NAMES[32]}.qairt-converter.log"
    assert log.read_text().startswith(f"$ {root}/bin/x86_64-linux-clang/qairt-converter --input_n")
    assert "Conversion completed" in log.read_text()


def test_releases_whose_converter_does_not_quantize_qdq_have_their_quantizer_do_it(
    tmp_path: Path, models: dict[int, Path], made: Path, root: Path
) -> None:
    assert "qairt-quantizer" not in {call["program"] for call in calls(root)}
    old = make_sdk(tmp_path / "sdk", "2.31.0.250130")
    QairtToolchain(QairtSdk.find(old)).convert(models[1], tmp_path / "one.dlc", PHONE)
    assert [call["program"] for call in calls(old)] == ["qairt-converter", "qairt-quantizer"]


def norm_model(path: Path, attributes: Mapping[str, Any] = MappingProxyType({})) -> Path:
    """Write an RMSNormalization in opset 23, whose weight is in a file of its own."""
    weight = np.linspace(0.5, 2, 48, dtype=np.float32)
    (path.parent / "weights").write_bytes(weight.tobytes())
    tensor = TensorProto(
        name="w", data_type=TensorProto.FLOAT, dims=[48], data_location=TensorProto.EXTERNAL
    )
    tensor.external_data.add(key="location", value="weights")
    nodes = [helper.make_node("RMSNormalization", ["x", "w"], ["y"], "norm", **attributes)]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 3, 48]) for n in "xy")
    graph = helper.make_graph(nodes, "norm", [x], [y], [tensor])
    opset = [helper.make_opsetid("", 23)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=10)
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize("attributes", [{}, {"axis": -1, "epsilon": 1e-2}])
def test_a_lowered_norm_computes_what_onnx_says(
    tmp_path: Path, attributes: dict[str, float]
) -> None:
    source = norm_model(tmp_path / "m.onnx", attributes)
    with lowered_opset(source) as path:
        lowered = onnx.load(str(path))
    assert {one.name for one in tmp_path.iterdir()} == {"m.onnx", "weights"}
    onnx.checker.check_model(lowered)
    assert lowered.opset_import[0].version == 21
    x = np.random.default_rng(3).normal(0, 0.05, (1, 3, 48)).astype(np.float32)
    evaluators: list[Any] = [ReferenceEvaluator(model) for model in (lowered, str(source))]
    ours, theirs = (evaluator.run(None, {"x": x})[0] for evaluator in evaluators)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize(
    ("node", "says"),
    [
        (helper.make_node("RotaryEmbedding", ["x", "a", "b"], ["y"]), "has no RotaryEmbedding"),
        (helper.make_node("Scale", ["x"], ["y"], domain="my.package"), "my.package::Scale is no"),
        (helper.make_node("Cast", ["x"], ["y"], to=1, round_mode="up"), "Cast has no round_mode"),
        (helper.make_node("RMSNormalization", ["x", "w"], ["y"], axis=1), "than the last axis"),
    ],
)
def test_what_no_older_opset_has_is_refused(
    tmp_path: Path, qairt: QairtToolchain, node: onnx.NodeProto, says: str
) -> None:
    model = onnx.load(str(norm_model(tmp_path / "m.onnx")), load_external_data=False)
    model.graph.node.append(node)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(InputFileError, match=says):
        qairt.convert(tmp_path / "m.onnx", tmp_path / "m.dlc", PHONE)


def test_every_flag_that_it_uses_is_documented(phone_binary: Path, qairt: QairtToolchain) -> None:
    assert qairt.description(phone_binary)["info"]["graphs"]
    used = {(call["program"], flag) for call in calls(qairt.sdk.root) for flag in call["arguments"]}
    for program, flag in used:
        if flag.startswith("--") and flag != "--help":
            assert flag in documented_flags(program, (2, 39))


def test_an_option_that_pypis_compiler_lacks_goes_to_the_sdks(
    tmp_path: Path, made: Path, qairt: QairtToolchain
) -> None:
    extensions = {"graphs": [{"num_cores": 1, "fp16_relaxed_precision": 0}]}
    config = CompileConfig.from_backend_extensions(extensions, PHONE)
    with pytest.raises(InvalidOptionError, match="--toolchain qairt"):
        OrtQnnToolchain().check(config)
    qairt.check(config)
    with pytest.raises(ToolchainError, match="num_cores"):  # of the wheel, in the stand-in
        qairt.compile(dlcs_of(made), tmp_path / "b.bin", config)


def test_options_reach_the_generator_for_each_graph_by_name(
    tmp_path: Path, made: Path, qairt: QairtToolchain
) -> None:
    config = CompileConfig.for_target(PHONE).with_options({"graphs.vtcm_size_in_mb": 4})
    config = config.with_graph_options([NAMES[32]], {"graphs.vtcm_size_in_mb": 2})
    info = qairt.compile(dlcs_of(made), tmp_path / "b.bin", config)
    sizes = {graph.name: graph.vtcm_mb for graph in info.graphs}
    assert sizes == {NAMES[1]: 4, NAMES[32]: 2}


def test_a_dlc_that_was_renamed_keeps_its_graphs_name_and_is_refused(
    tmp_path: Path, made: Path, qairt: QairtToolchain
) -> None:
    renamed = tmp_path / "other.dlc"
    renamed.write_bytes(dlcs_of(made)[0].read_bytes())
    with pytest.raises(ToolchainError, match=f"its graphs are {NAMES[1]}, and not other"):
        qairt.compile([renamed], tmp_path / "b.bin", CompileConfig.for_target(PHONE))
    assert {path.name for path in tmp_path.iterdir() if path.suffix != ".log"} == {"other.dlc"}


def test_names_op_packages_and_orders_of_tensors_are_refused_before_it_starts(
    tmp_path: Path, models: dict[int, Path], qairt: QairtToolchain
) -> None:
    with pytest.raises(InputFileError, match="becomes the name of its graph"):
        qairt.convert(models[1], tmp_path / "model.0.s1.dlc", PHONE)
    package = OpPackageLibrary(tmp_path / "lib.so", "provider")
    ports = {NAMES[1]: GraphPorts((), ())}
    refused: list[dict[str, Any]] = [{"op_packages": [package]}, {"ports": ports}]
    for options in refused:
        with pytest.raises(InvalidOptionError, match="--toolchain pypi"):
            qairt.compile(
                [tmp_path / "a.dlc"], tmp_path / "b", CompileConfig.for_target(PHONE), **options
            )


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("#!/bin/sh\necho 'no Python'; exit 3\n", "it ended with status 3: no Python"),
        ("#!/bin/sh\nexit 0\n", "did not write"),
        ("#!/bin/sh\nkill -SEGV $$\n", "SIGSEGV"),
        ("#!/nowhere/python\n", "status 1.*No such file"),
    ],
)
def test_a_program_that_fails_leaves_nothing_but_logs(
    tmp_path: Path, models: dict[int, Path], script: str, reason: str
) -> None:
    root, out = make_sdk(tmp_path / "sdk"), tmp_path / "out"
    program = QairtSdk.find(root).program("qairt-converter")
    program.write_text(script)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    out.mkdir()
    with pytest.raises(ToolchainError, match=reason):
        open_toolchain("qairt", root).convert(models[1], out / "one.dlc", PHONE)
    assert not [path.name for path in out.iterdir() if path.suffix != ".log"]


def test_converters_run_under_the_python_that_is_named(
    tmp_path: Path, models: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, python = make_sdk(tmp_path / "sdk"), tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho named > {tmp_path}/named\nexit 4\n")
    python.chmod(0o755)
    monkeypatch.setenv(PYTHON_VARIABLE, str(python))
    with pytest.raises(ToolchainError, match=r"qairt-converter of .*status 4"):
        open_toolchain("qairt", root).convert(models[1], tmp_path / "one.dlc", PHONE)
    assert (tmp_path / "named").is_file()


def test_it_is_found_by_option_variable_or_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "installed"
    for version in ("2.9.0.1", "2.39.0.250926", "2.31.0.250130", "not-a-version"):
        (installed / version).mkdir(parents=True)
    monkeypatch.setattr(registry, "INSTALL_FOLDER", installed)
    assert sdk_root({}) == installed / "2.39.0.250926"
    assert sdk_root({"QNN_SDK_ROOT": "/a", "QAIRT_SDK_ROOT": "/b"}) == Path("/b")
    monkeypatch.setattr(registry, "INSTALL_FOLDER", tmp_path / "none")
    assert sdk_root({}) is None


def test_an_sdk_that_is_not_usable(tmp_path: Path) -> None:
    root = make_sdk(tmp_path / "sdk")
    for text, says in (("2.20.0", r"2\.29 is the oldest"), ("?", r"no sdk\.yaml with a version")):
        (root / "sdk.yaml").write_text(f"version: {text}\n")
        with pytest.raises(ToolchainMissingError, match=says):
            QairtSdk.find(root)
    (root / "bin/x86_64-linux-clang/qairt-converter").unlink()
    with pytest.raises(ToolchainMissingError, match="lacks bin/x86_64-linux-clang/qairt-conv"):
        QairtSdk.find(root)


def test_no_sdk_and_no_such_toolchain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "INSTALL_FOLDER", tmp_path / "none")
    for name in registry.ROOT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ToolchainMissingError, match=r"softwarecenter\.qualcomm\.com"):
        open_toolchain("qairt")
    with pytest.raises(InvalidOptionError, match="pypi"):
        open_toolchain("snpe")
    with pytest.raises(InvalidOptionError, match="--toolchain qairt"):
        open_toolchain("pypi", tmp_path)


HTP = ("-i", "MODEL", "--target_backend", "HTP")


@pytest.mark.parametrize(
    ("program", "arguments", "says"),
    [
        ("qairt-converter", ["--input_network", "MODEL", "--float_fallback"], "unrecognized"),
        ("qairt-converter", ["--output_path", "a.dlc"], "required: --input_network"),
        ("qairt-converter", [*HTP, "--target_soc_model", "8750"], "invalid value: '8750'"),
        ("qairt-converter", ["-i", "MODEL", "--target_soc_model", "SM8750"], "needs --target_bac"),
        ("qairt-quantizer", ["-i", "MODEL", "-f", "--input_list", "MODEL"], "cannot be used wi"),
        ("qairt-quantizer", ["-i", "nowhere.dlc"], "nowhere.dlc does not exist"),
        ("qnn-context-binary-generator", ["--dlc_path", "MODEL"], "required: --backend"),
    ],
)
def test_the_stand_in_refuses_what_the_documents_do_not_have(
    models: dict[int, Path], program: str, arguments: Sequence[str], says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    words = [one.replace("MODEL", str(models[1])) for one in arguments]
    with pytest.raises(SystemExit) as caught:
        parse(program, documented_flags(program, (2, 39)), words)
    assert caught.value.code in {1, 2}
    assert says in capsys.readouterr().err
