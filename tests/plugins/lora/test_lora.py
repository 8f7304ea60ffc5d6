"""Branches against the merged model, adapters that mix, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from buildlib.builder.canonical import ImportModel
from buildlib.builder.lora_config import LoraBuilderInputConfig, LoraSet
from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.checkpoint.tokenizer import text_windows
from buildlib.encodings.files import load_encodings, save_encodings
from buildlib.encodings.model import Encodings
from buildlib.errors import BuildError, InvalidOptionError, ModelFileError
from buildlib.graph.decoder import export_onnx
from buildlib.graph.files import load_model
from buildlib.graph.shape import GraphShape
from buildlib.numerics.host_loop import HostLoop
from buildlib.numerics.runners import OnnxRunner
from buildlib.passes.arcl import convert_arcl
from buildlib.passes.mha2sha import convert_mha2sha
from buildlib.quantize.bitwidths import Bitwidths
from buildlib.quantize.qdq import apply_encodings
from buildlib.quantize.techniques.base import FloatModel
from buildlib.quantize.techniques.scaling import Scaling
from plugins.lora.adapters import Adapters
from plugins.lora.branches import LoraBranches
from plugins.lora.calibration import calibrate_adapters
from plugins.lora.peft import read_adapter
from plugins.lora.projections import find_projections
from tests.buildlib.onnx_models import assert_near, random_feeds, run_once

MakeAdapter = Callable[..., Path]
ALPHA = "lora_alpha"
ALL = {
    "self_attn.q_proj": (40, 72),
    "self_attn.k_proj": (40, 24),
    "self_attn.v_proj": (40, 24),
    "self_attn.o_proj": (72, 40),
    "mlp.gate_proj": (40, 72),
    "mlp.up_proj": (40, 72),
    "mlp.down_proj": (72, 40),
}
SHAPE = GraphShape(16, 96)


def adapters_of(folder: Path, export: Path) -> Adapters:
    return Adapters.load(LoraSet.load(folder), find_projections(load_model(export / "model.onnx")))


def with_branches(folder: Path, export: Path, out: Path) -> tuple[Adapters, Path]:
    adapters = adapters_of(folder, export)
    return adapters, LoraBranches(adapters.branches, ALPHA).run(export / "model.onnx", out)


def merged(checkpoint: Path, adapter: Path, weight: float, folder: Path) -> Path:
    """The checkpoint with W + weight * scale * B @ A in place of W."""
    tensors = {
        k: v.astype(np.float32) for k, v in load_file(checkpoint / "model.safetensors").items()
    }
    halves = load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = weight * config["lora_alpha"] / config["r"]
    for name in halves:
        if name.endswith("lora_A.weight"):
            key = name.removeprefix("base_model.model.").replace("lora_A.", "")
            tensors[key] += scale * halves[name.replace("lora_A", "lora_B")] @ halves[name]
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_bytes((checkpoint / name).read_bytes())
    return folder


Adapted = tuple[Adapters, Path]


@pytest.fixture(scope="module")
def adapted(
    tiny_export: Path, make_adapter: MakeAdapter, tmp_path_factory: pytest.TempPathFactory
) -> Adapted:
    """An adapter of all modules, and the model with branches for it."""
    folder = tmp_path_factory.mktemp("adapted")
    return with_branches(make_adapter(folder / "one", ALL), tiny_export, folder / "lora.onnx")


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
def test_the_graph_with_an_adapter_is_the_merged_model(
    weight: float, tiny: Path, tiny_export: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    folder = make_adapter(tmp_path / "one", ALL)
    adapters, model = with_branches(folder, tiny_export, tmp_path / "l.onnx")
    assert len(adapters.branches) == 14
    checkpoint = Checkpoint.load(merged(tiny, folder, weight, tmp_path / "merged"))
    reference = export_onnx(checkpoint, SHAPE, tmp_path / "reference")
    constants = {**adapters.tensors("one"), ALPHA: np.full(1, weight, np.float32)}
    feeds = random_feeds(model) | constants
    assert_near(run_once(model, feeds), run_once(reference, feeds))


def test_adapters_of_the_original_model_fit_the_rescaled_one(
    tiny: Path, tiny_text: str, tiny_export: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    folder = make_adapter(tmp_path / "one", ALL)
    checkpoint = Checkpoint.load(tiny)
    windows = text_windows(checkpoint.tokenizer_path, tiny_text, 96, 0, 2)
    given = (tiny_export / "model.onnx", Encodings(), checkpoint.config, windows, Bitwidths())
    (tmp_path / "scaled").mkdir()
    scaled = Scaling("scaling").optimize(FloatModel(*given), tmp_path / "scaled")
    adapters = Adapters.load(
        LoraSet.load(folder), find_projections(load_model(scaled.path)), scaled.factors
    )
    LoraBranches(adapters.branches, ALPHA).run(scaled.path, tmp_path / "scaled" / "l.onnx")
    merged_model = Checkpoint.load(merged(tiny, folder, 1.0, tmp_path / "merged"))
    reference = export_onnx(merged_model, SHAPE, tmp_path / "reference")
    plain = random_feeds(reference)
    factors = {
        name: scaled.factors[name.replace("_in", "_out")]
        for name in plain
        if name.startswith("past")
    }
    feeds = {name: values * factors.get(name, 1) for name, values in plain.items()}
    strength = {ALPHA: np.ones(1, np.float32)}
    found = run_once(tmp_path / "scaled" / "l.onnx", feeds | adapters.tensors("one") | strength)
    assert_near(
        {name: values / scaled.factors.get(name, 1) for name, values in found.items()},
        run_once(reference, plain),
    )


def test_use_cases_mix_adapters_of_different_ranks_and_modules(
    tiny_export: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    one = make_adapter(tmp_path / "one", {"self_attn.q_proj": (40, 72)}, rank=2)
    two = make_adapter(tmp_path / "two", {"self_attn.q_proj": (40, 72)}, rank=3, seed=1)
    three = make_adapter(tmp_path / "three", {"mlp.up_proj": (40, 72)}, rank=1)
    description = {
        "adapters": [{"name": f.name, "path": f.name} for f in (one, two, three)],
        "use_cases": [
            {"name": "mixed", "adapters": {"one": 0.5, "two": -2.0}},
            {"name": "third", "adapters": {"three": 1.0}},
        ],
    }
    (tmp_path / "set.json").write_text(json.dumps(description))
    adapters = adapters_of(tmp_path / "set.json", tiny_export)
    assert {str(branch.module): branch.rank for branch in adapters.branches} == {
        "q_proj of layer 0": 5,
        "up_proj of layer 0": 1,
        "q_proj of layer 1": 5,
        "up_proj of layer 1": 1,
    }
    tensors = adapters.tensors("mixed")
    (_, first), _ = read_adapter(one).modules.items()
    (_, second), _ = read_adapter(two).modules.items()
    (a1, b1), (a2, b2) = first.matrices(), second.matrices()
    product = tensors["lora_a_0_q_proj"] @ tensors["lora_b_0_q_proj"]
    np.testing.assert_allclose(product, (0.5 * b1 @ a1 - 2.0 * b2 @ a2).T, atol=1e-5)
    assert not tensors["lora_b_0_up_proj"].any()
    files = adapters.write(tmp_path / "out")
    assert min(files) == "lora/mixed/lora_a_0_q_proj.raw"
    stored = np.fromfile(files["lora/mixed/lora_a_0_q_proj.raw"], np.float32)
    np.testing.assert_array_equal(stored.reshape(40, 5), tensors["lora_a_0_q_proj"])
    lora = adapters.genie(ALPHA)
    assert [adapter.path for adapter in lora.adapters] == ["lora/mixed", "lora/third"]


def test_fused_modules_are_taken_apart(
    tiny_export: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    folder = make_adapter(tmp_path / "f", {"self_attn.qkv_proj": (40, 120)})
    adapters = adapters_of(folder, tiny_export)
    (_, matrices), _ = read_adapter(folder).modules.items()
    whole = matrices.matrices()[1].T
    tensors = adapters.tensors("f")
    parts = [tensors[f"lora_b_0_{name}_proj"] for name in "qkv"]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)


def test_branches_survive_arcl_and_quantization(
    tiny_export: Path, adapted: Adapted, tmp_path: Path
) -> None:
    adapters, model = adapted
    config = Checkpoint.load(tiny_export).config
    rng = np.random.default_rng(0)
    windows = [rng.integers(2, 300, 96).tolist()]
    given = load_encodings(model.with_suffix(".encodings"))
    for mode in ("adapter_only", "all"):
        calibrated = calibrate_adapters(model, adapters, ALPHA, config, windows, mode)
        encodings = calibrated.encodings
        by_name = {e.name: e for e in encodings.activation_encodings}
        alpha = by_name[ALPHA]
        assert alpha.scale[0] * (32767 + alpha.offset[0]) == 1.0
        same = [by_name[e.name] == e for e in given.activation_encodings if "lora" not in e.name]
        assert all(same) == (mode == "adapter_only")
    decode = convert_arcl(model, GraphShape(1, 48), tmp_path / "decode.onnx")
    ports = OnnxRunner(decode).ports.inputs
    assert ports["lora_a_0_q_proj"].shape == (40, 4)
    assert ports["input_ids"].shape == (1, 1)
    qdq = OnnxRunner(apply_encodings(model, encodings, tmp_path / "qdq.onnx"))
    assert qdq.ports.inputs["lora_b_1_down_proj"].dtype == np.uint16


def test_a_second_pass_and_foreign_modules_are_refused(
    adapted: Adapted, tiny_export: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    adapters, model = adapted
    with pytest.raises(ModelFileError, match="it has no adapters yet: it takes lora_"):
        LoraBranches(adapters.branches, ALPHA).run(model, tmp_path / "twice.onnx")
    for name, modules, layers, said in (
        ("foreign", {"self_attn.z_proj": (40, 72)}, 2, "no z_proj of layer 0"),
        ("deep", {"self_attn.q_proj": (40, 72)}, 3, "no q_proj of layer 2"),
        ("wide", {"self_attn.q_proj": (40, 80)}, 2, "maps 40 to 80, in the model 40 to 72"),
    ):
        folder = make_adapter(tmp_path / name, modules, layers=layers)
        with pytest.raises(ModelFileError, match=said):
            adapters_of(folder, tiny_export)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"lora_bias": True}, "lora_bias"),
        ({"alora_invocation_tokens": [5, 6]}, "alora_invocation_tokens"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
        ({"some_later_key": {"a": 1}}, "some_later_key"),
        ({"init_lora_weights": "pissa_niter_4"}, "changed the base's weights.*path_initial_model"),
        ({"init_lora_weights": "olora"}, "changed the base's weights"),
        ({"alpha_pattern": {"q_proj(": 1}}, "no regular expression"),
        ({"bias": "all"}, "bias=all"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"r": 0}, "r: "),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
    ],
)
def test_adapters_beyond_plain_lora_are_refused(
    changes: dict[str, object], said: str, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    folder = make_adapter(tmp_path / "a", {"self_attn.q_proj": (40, 72)}, **changes)
    with pytest.raises(ModelFileError, match=said) as caught:
        read_adapter(folder)
    assert "\n" not in str(caught.value)


def test_an_adapter_of_peft_has_the_logits_of_torch(trained: Path, tmp_path: Path) -> None:
    """Patterns of ranks and alphas, one of them anchored, and rank-stabilized scales."""
    folder = Path(__file__).parents[2] / "fixtures/adapters/patterns"
    checkpoint = Checkpoint.load(trained)
    export_onnx(checkpoint, GraphShape(8, 24), tmp_path)
    adapters, model = with_branches(folder, tmp_path, tmp_path / "l.onnx")
    constants = {**adapters.tensors("patterns"), ALPHA: np.ones(1, np.float32)}
    with HostLoop({8: [OnnxRunner(model)]}, checkpoint.config, constants=constants) as loop:
        logits = loop.feed([0, 300, 17, 512, 90, 41, 7, 1100])
    expected = np.load(folder / "logits.npy")
    np.testing.assert_allclose(logits[:, : expected.shape[1]], expected, rtol=1e-4, atol=1e-4)


def test_an_adapter_of_a_model_with_fewer_layers_is_refused(
    tiny_export: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    modules = {"self_attn.q_proj": (40, 72)}
    first = make_adapter(tmp_path / "first", modules, layers=1)
    with pytest.raises(ModelFileError, match=r"another model's.*all layers, but not of 1"):
        adapters_of(first, tiny_export)
    for name, changes in (
        ("chosen", {"layers_to_transform": [0]}),
        ("regex", {"target_modules": r".*layers\.0\..*q_proj"}),
    ):
        folder = make_adapter(tmp_path / name, modules, layers=1, **changes)
        assert len(adapters_of(folder, tiny_export).branches) == 1


def test_a_strong_adapter_is_within_the_ranges_of_all(
    tiny_export: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    """Ranges of the model alone clip it, which is told."""
    folder = make_adapter(tmp_path / "strong", ALL, rank=1, strength=32.0)
    adapters, model = with_branches(folder, tiny_export, tmp_path / "lora.onnx")
    config = Checkpoint.load(tiny_export).config
    tokens = np.random.default_rng(0).integers(2, 300, 64).tolist()
    constants = {**adapters.tensors("strong"), ALPHA: np.ones(1, np.float32)}

    def logits(path: Path) -> np.ndarray:
        with HostLoop({16: [OnnxRunner(path)]}, config, constants=constants) as loop:
            return np.concatenate([loop.feed(tokens[at : at + 16]) for at in range(0, 64, 16)])

    expected, errors = logits(model), {}
    for mode in ("adapter_only", "all"):
        calibration = calibrate_adapters(model, adapters, ALPHA, config, [tokens], mode)
        assert list(calibration.beyond) == (["strong"] if mode == "adapter_only" else [])
        quantized = apply_encodings(model, calibration.encodings, tmp_path / f"{mode}.onnx")
        errors[mode] = float(np.square(logits(quantized) - expected).sum())
    assert errors["all"] < errors["adapter_only"] / 4


def test_ranges_that_clip_the_model_grow_by_what_adapters_add(
    tiny_export: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    """Encodings of others may leave outliers out on purpose: without adapters they stay."""
    folder = make_adapter(tmp_path / "none", ALL, strength=0.0)
    adapters, model = with_branches(folder, tiny_export, tmp_path / "lora.onnx")
    path = model.with_suffix(".encodings")
    given = load_encodings(path)
    narrow = [
        e if e.name.startswith("past") else e.model_copy(update={"scale": (e.scale[0] / 3,)})
        for e in given.activation_encodings
    ]
    save_encodings(given.model_copy(update={"activation_encodings": tuple(narrow)}), path)
    config = Checkpoint.load(tiny_export).config
    calibration = calibrate_adapters(model, adapters, ALPHA, config, [list(range(2, 66))])
    by_name = calibration.encodings.by_name()
    assert all(by_name[encoding.name] == encoding for encoding in narrow)


def test_options_are_refused_by_name(tmp_path: Path) -> None:
    for values, said in (
        ({"lora_version": 2}, "lora_config.lora_version.*QAIRT SDK"),
        ({"alpha_tensor_name": "strength"}, "alpha_tensor_name.*'lora'"),
        ({"quant_updatable_mode": "none"}, "quant_updatable_mode"),
        ({"surprise": 1}, "lora_config.surprise"),
    ):
        with pytest.raises(InvalidOptionError, match=said):
            LoraBuilderInputConfig.create(lora_config_path=tmp_path, **values)
    config = LoraBuilderInputConfig.create(lora_config_path=tmp_path)
    assert (config.create_lora_graph, config.alpha_tensor_name) == (True, ALPHA)
    with pytest.raises(ModelFileError, match=r"adapter_config\.json"):
        LoraSet.load(tmp_path)


@given(data=st.data())
def test_damaged_adapters_are_one_typed_line(
    data: st.DataObject, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    folder = make_adapter(tmp_path / "a", {"self_attn.q_proj": (40, 72)}, layers=1)
    path = folder / data.draw(st.sampled_from(["adapter_model.safetensors", "adapter_config.json"]))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, min(len(content), 400) - 1))] = data.draw(
            st.integers(0, 255)
        )
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        for low_rank in read_adapter(folder).modules.values():
            low_rank.matrices()
    except BuildError as error:
        assert "\n" not in str(error)  # noqa: PT017


def test_modules_are_found_by_what_they_do(tiny_export: Path) -> None:
    model = load_model(tiny_export / "model.onnx")
    for index, value in enumerate(list(model.graph.initializers.values())):
        value.name = f"w{index}"
    for index, node in enumerate(model.graph):
        node.name = f"n{index}"
        for value in node.outputs:
            if value not in model.graph.outputs:
                value.name = f"v{index}_{value.index()}"
    layers = find_projections(model)
    sizes = {name.rpartition(".")[2]: size for name, size in ALL.items()}
    assert sorted(layers) == [0, 1]
    for modules in layers.values():
        assert {name: (p.n_in, p.n_out) for name, p in modules.items()} == sizes
    uses = [use.node for modules in layers.values() for use in modules["gate_proj"].output.uses()]
    assert sorted(node.op_type for node in uses) == ["Mul", "Mul", "Sigmoid", "Sigmoid"]


def test_branches_survive_single_head_attention(adapted: Adapted, tmp_path: Path) -> None:
    adapters, whole = adapted
    heads = convert_mha2sha(whole, tmp_path / "sha.onnx")
    feeds = random_feeds(whole) | adapters.tensors("one") | {ALPHA: np.ones(1, np.float32)}
    assert random_feeds(heads).keys() == feeds.keys()
    assert_near(run_once(heads, feeds), run_once(whole, feeds))


@pytest.mark.needs("plugins.onnx_exports")
def test_fused_modules_of_a_fused_graph_stay_whole(
    make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    (export,) = (Path(__file__).parents[2] / "fixtures/exports/dynamo-phi3").glob("*.onnx")
    ImportModel(GraphShape(8, 32)).run(export, tmp_path / "model.onnx")
    modules = {"self_attn.qkv_proj": (32, 64), "mlp.gate_up_proj": (32, 48)}
    folder = make_adapter(tmp_path / "f", modules)
    adapters, _ = with_branches(folder, tmp_path, tmp_path / "l.onnx")
    assert [branch.module.name for branch in adapters.branches[:2]] == ["gate_up_proj", "qkv_proj"]
    alone = make_adapter(tmp_path / "q", {"self_attn.q_proj": (32, 32)})
    with pytest.raises(ModelFileError, match="it has down_proj, gate_up_proj"):
        adapters_of(alone, tmp_path)
