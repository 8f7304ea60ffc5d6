"""The real compiler and emulator, on a small model."""

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import helper

from buildlib.errors import InputFileError, ToolchainError, ToolchainTimeoutError
from buildlib.targets import parse_target
from buildlib.toolchains.base import GraphPorts, ScaleOffset, TensorInfo, Toolchain
from buildlib.toolchains.compile_config import CompileConfig
from buildlib.toolchains.ort_qnn import toolchain as toolchain_module
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain
from buildlib.toolchains.requests import CompileRequest, GraphRequest
from tests.buildlib.onnx_models import model_of

pytestmark = pytest.mark.needs("libatomic1")
PHONE = parse_target("SM8750")
Binaries = Callable[[str], Path]


def test_versions_name_everything_that_compiles(toolchain: OrtQnnToolchain) -> None:
    as_protocol: Toolchain = toolchain
    versions = dict(as_protocol.versions())
    assert list(versions) == list(toolchain.versions())
    assert versions["toolchain"] == "ort-qnn"
    assert versions["qnn_build"].startswith("v2.")
    assert all(versions[key].count(".") == 2 for key in ("qnn_core_api", "qnn_system_api"))


@pytest.mark.parametrize("target", ["SM8750", "SM8850:emulator"])
def test_binary_says_what_it_was_compiled_for(
    target: str, binary_for: Binaries, toolchain: OrtQnnToolchain
) -> None:
    soc = parse_target(target).soc
    info = toolchain.inspect(binary_for(target))
    assert (info.soc_model, info.dsp_arch) == (soc.soc_model, soc.dsp_arch)
    assert info.build_id == toolchain.versions()["qnn_build"]
    assert info.size_bytes == binary_for(target).stat().st_size
    assert [graph.name for graph in info.graphs] == ["ar1_cl64_1_of_1", "ar32_cl64_1_of_1"]
    for graph in info.graphs:
        assert (graph.vtcm_mb, graph.optimization_level) == (soc.vtcm_mb, 3)
    graph = info.graph("ar32_cl64_1_of_1")
    for name, width, scale in (("x", 256, 1e-4), ("y", 512, 1e-3)):
        encoding = ScaleOffset(float(np.float32(scale)), -32768)
        assert graph.tensor(name) == TensorInfo(name, (1, 32, width), "uint16", encoding)


def test_ports_stand_in_the_order_that_is_asked_for(
    toolchain: OrtQnnToolchain, tmp_path: Path
) -> None:
    dims, names = [1, 4, 32], ["a", "b", "c", "d"]
    nodes = [
        node
        for name in names
        for node in (
            helper.make_node("DequantizeLinear", [name, "scale", "zero"], [f"{name}_real"]),
            helper.make_node("Relu", [f"{name}_real"], [f"{name}_relu"]),
            helper.make_node("QuantizeLinear", [f"{name}_relu", "scale", "zero"], [f"{name}_out"]),
        )
    ]
    grid: dict[str, npt.NDArray[np.generic]] = {
        "scale": np.array(1e-4, np.float32),
        "zero": np.array(30000, np.uint16),
    }
    taken, given = ({f"{name}{end}": (np.uint16, dims) for name in names} for end in ("", "_out"))
    onnx.save(model_of(nodes, taken, given, grid), tmp_path / "m.onnx")
    dlc, target = tmp_path / "model.0.s4.dlc", parse_target("SM8750:emulator")
    toolchain.convert(tmp_path / "m.onnx", dlc, target)
    assert dlc.stat().st_mode & 0o777 == tmp_path.stat().st_mode & 0o666
    config = CompileConfig.for_target(target)
    [plain] = toolchain.compile([dlc], tmp_path / "plain.bin", config).graphs
    order, binary = ["b", "d", "a", "c"], tmp_path / "ordered.bin"
    ports = GraphPorts(
        tuple(plain.tensor(name) for name in order),
        tuple(plain.tensor(f"{name}_out") for name in order),
    )
    [graph_info] = toolchain.compile([dlc], binary, config, ports={dlc.stem: ports}).graphs
    assert (graph_info.inputs, graph_info.outputs) == (ports.inputs, ports.outputs)
    inputs = {name: np.full(dims, 20_000 * number, np.uint16) for number, name in enumerate(names)}
    outputs = toolchain.execute(binary, dlc.stem, inputs)
    for name, values in inputs.items():
        np.testing.assert_array_equal(outputs[f"{name}_out"], np.maximum(values, 30000))


def test_emulator_computes_what_the_model_means(
    weights: npt.NDArray[np.float32],
    binary_for: Binaries,
    toolchain: OrtQnnToolchain,
) -> None:
    stored = np.random.default_rng(1).integers(28000, 37000, (1, 32, 256)).astype(np.uint16)
    outputs = toolchain.execute(binary_for("SM8750:emulator"), "ar32_cl64_1_of_1", {"x": stored})
    real = (outputs["y"].astype(np.float64) - 32768) * 1e-3
    expected = ((stored.astype(np.float64) - 32768) * 1e-4) @ weights
    np.testing.assert_allclose(real, expected, atol=2e-3)


def test_shared_weights_make_the_phone_binary_smaller_and_no_emulator_runs_them(
    binary_for: Binaries, toolchain: OrtQnnToolchain
) -> None:
    shared, unshared = binary_for("SM8750"), binary_for("SM8750:emulator")
    one_copy = 256 * 512
    assert unshared.stat().st_size - shared.stat().st_size > one_copy * 0.9
    stored = np.zeros((1, 1, 256), np.uint16)
    with pytest.raises(ToolchainError) as caught:
        toolchain.execute(shared, "ar1_cl64_1_of_1", {"x": stored})
    assert "Shared weights" in Path(caught.value.log_path).read_text()


@pytest.mark.parametrize(
    ("inputs", "graph", "said"),
    [
        ({}, "ar1_cl64_1_of_1", "input x is missing"),
        ({"x": np.zeros((1, 2, 256), np.uint16)}, "ar1_cl64_1_of_1", r"takes uint16\(1, 1, 256\)"),
        ({}, "other", "no graph 'other'"),
    ],
)
def test_execute_refuses_inputs_that_do_not_fit(
    inputs: dict[str, npt.NDArray[np.generic]],
    graph: str,
    said: str,
    binary_for: Binaries,
    tmp_path: Path,
) -> None:
    logged = OrtQnnToolchain(log_dir=tmp_path)
    with pytest.raises(ToolchainError, match=said):
        logged.execute(binary_for("SM8750:emulator"), graph, inputs)


def test_equal_models_give_equal_binaries_wherever_they_lie(
    models: dict[int, Path],
    binary_for: Binaries,
    toolchain: OrtQnnToolchain,
    tmp_path: Path,
) -> None:
    again = []
    for ar in (1, 32):
        elsewhere = tmp_path / f"other{ar}.onnx"
        shutil.copy(models[ar], elsewhere)
        again.append(tmp_path / f"ar{ar}_cl64_1_of_1.dlc")
        toolchain.convert(elsewhere, again[-1], PHONE)
    info = toolchain.compile(again, tmp_path / "again.bin", CompileConfig.for_target(PHONE))
    assert (tmp_path / "again.bin").read_bytes() == binary_for("SM8750").read_bytes()
    assert info == toolchain.inspect(binary_for("SM8750"))


@pytest.mark.parametrize("damage", ["random", "truncated", "absent"])
def test_damaged_dlc_is_an_error_and_leaves_nothing(
    damage: str, dlcs: list[Path], tmp_path: Path
) -> None:
    dlc = tmp_path / "bad.dlc"
    whole = dlcs[0].read_bytes()
    content = {"random": np.random.default_rng(3).bytes(5000), "truncated": whole[:9000]}
    if damage != "absent":
        dlc.write_bytes(content[damage])
    toolchain = OrtQnnToolchain(log_dir=tmp_path / "logs")
    with pytest.raises(ToolchainError) as caught:
        toolchain.compile([dlc], tmp_path / "out.bin", CompileConfig.for_target(PHONE))
    assert "\n" not in str(caught.value)
    assert {p.name for p in tmp_path.iterdir()} <= {"bad.dlc", "logs"}


def test_graphs_need_names_of_their_own(toolchain: OrtQnnToolchain, tmp_path: Path) -> None:
    dlcs = [tmp_path / folder / "x.dlc" for folder in "ab"]
    with pytest.raises(ValueError, match="stems"):
        toolchain.compile(dlcs, tmp_path / "out.bin", CompileConfig.for_target(PHONE))


@pytest.mark.parametrize("damage", ["random", "absent", "unsupported"])
def test_bad_model_is_an_error_and_leaves_nothing(
    damage: str, models: dict[int, Path], tmp_path: Path
) -> None:
    model = tmp_path / "bad.onnx"
    if damage == "random":
        model.write_bytes(np.random.default_rng(3).bytes(5000))
    elif damage == "unsupported":
        known = onnx.load(models[1])
        known.graph.node[2].op_type = "Nonsense"
        onnx.save(known, model)
    toolchain = OrtQnnToolchain(log_dir=tmp_path / "logs")
    with pytest.raises(ToolchainError) as caught:
        toolchain.convert(model, tmp_path / "out.dlc", PHONE)
    assert caught.value.exit_status == 1
    assert "\n" not in str(caught.value)
    assert {p.name for p in tmp_path.iterdir()} <= {"bad.onnx", "logs"}


@pytest.mark.parametrize("damage", ["random", "truncated", "flipped", "absent"])
def test_damaged_binary_is_an_error(
    damage: str, binary_for: Binaries, toolchain: OrtQnnToolchain, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.bin"
    whole = bytearray(binary_for("SM8750").read_bytes())
    random = np.random.default_rng(4)
    if damage == "flipped":
        for place in random.integers(0, 512, 200):
            whole[place] ^= 0xFF
    content: dict[str, bytes | bytearray]
    content = {"random": random.bytes(5000), "truncated": whole[:3000], "flipped": whole}
    if damage != "absent":
        bad.write_bytes(content[damage])
    with pytest.raises(InputFileError) as caught:
        toolchain.inspect(bad)
    assert "\n" not in str(caught.value)
    if damage == "random":
        assert "another kind of file (QNN error " in str(caught.value)
        assert "what can be read are containers, context binaries, DLCs" in str(caught.value)


def test_a_step_that_takes_too_long_is_killed(
    models: dict[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(toolchain_module._TIMEOUTS_S, "convert", 0.05)
    with pytest.raises(ToolchainTimeoutError, match=r"no end after 0\.05 s"):
        OrtQnnToolchain(tmp_path / "logs").convert(models[1], tmp_path / "out.dlc", PHONE)
    assert [p.name for p in tmp_path.iterdir()] == ["logs"]


def test_graphs_of_one_binary_may_differ(
    dlcs: list[Path], toolchain: OrtQnnToolchain, tmp_path: Path
) -> None:
    config = CompileConfig.for_target(PHONE).with_graph_options(
        [dlcs[0].stem], {"graphs.vtcm_size_in_mb": 2, "graphs.optimization_type": 1}
    )
    graphs = toolchain.compile(dlcs, tmp_path / "mixed.bin", config).graphs
    assert [(g.vtcm_mb, g.optimization_level) for g in graphs] == [(2, 1), (8, 3)]


def test_operators_that_are_not_supported_are_named_and_counted(
    models: dict[int, Path], tmp_path: Path
) -> None:
    model = onnx.load(models[1])
    last = "y"
    for number in range(2):
        names = [f"{kind}_{number}" for kind in ("real", "shrunk", "stored")]
        model.graph.node.extend(
            [
                helper.make_node("DequantizeLinear", [last, "y_scale", "zero"], [names[0]]),
                helper.make_node("Shrink", [names[0]], [names[1]], name=f"odd_{number}"),
                helper.make_node("QuantizeLinear", [names[1], "y_scale", "zero"], [names[2]]),
            ]
        )
        last = names[2]
    model.graph.output[0].name = last
    onnx.save(model, tmp_path / "ar1_cl64_2_of_3.onnx")
    toolchain = OrtQnnToolchain(log_dir=tmp_path / "logs")
    with pytest.raises(ToolchainError) as caught:
        toolchain.convert(tmp_path / "ar1_cl64_2_of_3.onnx", tmp_path / "out.dlc", PHONE)
    error = caught.value
    for part in ("convert", "ar1_cl64_2_of_3", "2 operators", "Shrink (2, first odd_0)", ".log"):
        assert part in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # noqa: S301 - our own bytes


def test_a_graph_that_does_not_compile_is_named(
    dlcs: list[Path], toolchain: OrtQnnToolchain, tmp_path: Path
) -> None:
    out = tmp_path / "out.bin"
    for_v81 = CompileRequest(
        tuple(GraphRequest(dlc, 8, 3) for dlc in dlcs),
        out,
        PHONE.soc.soc_model,
        weight_sharing=True,
        extended_udma=True,
    )
    with pytest.raises(ToolchainError, match=f"graph {dlcs[0].stem} does not compile"):
        toolchain._run("compile", out, for_v81)
    assert not out.exists()
