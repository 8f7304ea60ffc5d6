"""A text encoder's ONNX becomes what Genie takes, and stays the same model."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from buildlib.container.container import GenAIContainer
from buildlib.errors import BuildError, InvalidOptionError, ModelFileError
from buildlib.genai import GenAIBuilderFactory
from buildlib.graph.files import load_model
from buildlib.numerics.runners import OnnxRunner
from plugins.encoders import tiny_encoder
from plugins.encoders.inputs import TextTokens, cosine, embed_in_float, padded_inputs
from plugins.encoders.interface import INPUTS, Pooling, PoolingMode, prompt_template, read_pooling
from plugins.encoders.onnx_import import import_encoder

LENGTH = 64
ENCODERS = Path(__file__).parents[2] / "fixtures" / "encoders"
Change = Callable[[onnx.ModelProto], None]


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_encoder.write(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def tokens(export: Path) -> list[list[int]]:
    sentences = [*tiny_encoder.heldout_sentences(3), "a", "and God said " * 40]
    return TextTokens(export / "tokenizer.json", ("", ""), LENGTH).of(sentences)


def write_modules(folder: Path, *kinds: str, pooling: dict[str, object]) -> None:
    names = [f"{number}_{kind}" if number else "" for number, kind in enumerate(kinds)]
    modules = [
        {"idx": number, "name": str(number), "path": name, "type": f"sentence_transformers.{kind}"}
        for number, (name, kind) in enumerate(zip(names, kinds, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def changed(export: Path, folder: Path, change: Change) -> Path:
    model = onnx.load(export / "model.onnx")
    change(model)
    onnx.save(model, folder / "changed.onnx")
    return folder / "changed.onnx"


def pooled(model: Path, tokens: list[list[int]]) -> list[np.ndarray]:
    runner = OnnxRunner(model)
    return [runner.run(padded_inputs(ids, LENGTH, padding=0))["pooled_output"][0] for ids in tokens]


@pytest.mark.parametrize("pooling", [Pooling(), Pooling("cls"), Pooling(normalized=True)])
def test_the_imported_model_is_the_same_model(
    export: Path, tokens: list[list[int]], tmp_path: Path, pooling: Pooling
) -> None:
    model = import_encoder(export / "model.onnx", tmp_path / "model.onnx", LENGTH, pooling)
    expected = embed_in_float(export / "model.onnx", tokens, pooling)
    for ours, theirs in zip(pooled(model, tokens), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.parametrize("name", ["encoder-roberta", "encoder-xlm-roberta"])
def test_positions_that_count_tokens_begin_with_the_text(name: str, tmp_path: Path) -> None:
    """RoBERTa's begin behind the number of its padding token; torch is the judge."""
    sample = np.load(ENCODERS / name / "sample.npz")
    model = import_encoder(ENCODERS / name / "model.onnx", tmp_path / "model.onnx", 32)
    runner = OnnxRunner(model)
    for size in (32, 9):
        states = runner.run(padded_inputs(sample[f"ids_{size}"][0].tolist(), 32, padding=0))
        wanted = sample[f"states_{size}"][0]
        np.testing.assert_allclose(states["sequence_output"][0, -size:], wanted, atol=2e-5)


def test_more_tokens_than_positions_are_refused(tmp_path: Path) -> None:
    export = ENCODERS / "encoder-roberta" / "model.onnx"
    with pytest.raises(ModelFileError, match="it has positions for 38 tokens"):
        import_encoder(export, tmp_path / "model.onnx", 39)


def test_it_has_the_inputs_and_outputs_that_genie_knows(export: Path, tmp_path: Path) -> None:
    model = load_model(import_encoder(export / "model.onnx", tmp_path / "model.onnx", LENGTH))
    inputs = [(v.name, str(v.dtype), tuple(v.shape or ())) for v in model.graph.inputs]
    assert inputs == [(name, "INT32", (1, LENGTH)) for name in INPUTS]  # one not of the export
    outputs = {str(v.name): tuple(v.shape or ()) for v in model.graph.outputs}
    assert outputs == {"sequence_output": (1, LENGTH, 144), "pooled_output": (1, 144)}
    assert "Erf" not in {node.op_type for node in model.graph}


def rename_output(model: onnx.ModelProto) -> None:
    model.graph.output[0].name = model.graph.node[-1].output[0] = "logits"


def drop_mask(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            if name == "attention_mask":
                node.input[index] = "token_type_ids"
    del model.graph.input[1]


def compare_mask(model: onnx.ModelProto) -> None:
    node = next(node for node in model.graph.node if "attention_mask" in node.input)
    node.input[0] = "mask_compared"
    compared = helper.make_node("Equal", ["attention_mask", "token_type_ids"], ["mask_equal"])
    cast = helper.make_node("Cast", ["mask_equal"], ["mask_compared"], to=7)
    model.graph.node.insert(0, cast)
    model.graph.node.insert(0, compared)


def bare_erf(model: onnx.ModelProto) -> None:
    half = next(tensor for tensor in model.graph.initializer if tensor.name == "half")
    half.CopyFrom(onnx.numpy_helper.from_array(np.array(0.7, np.float32), "half"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (rename_output, "it is not a text encoder"),
        (drop_mask, "it has no attention_mask"),
        (compare_mask, "export it with eager attention"),
        (bare_erf, "is no part of a GELU"),
    ],
)
def test_unsupported_encoders_are_refused(
    export: Path, tmp_path: Path, change: Change, reason: str
) -> None:
    with pytest.raises(ModelFileError, match=reason):
        import_encoder(changed(export, tmp_path, change), tmp_path / "model.onnx", LENGTH)


def test_a_model_of_one_length_is_built_at_that_length_only(export: Path, tmp_path: Path) -> None:
    def fix(model: onnx.ModelProto) -> None:
        for value in model.graph.input:
            value.type.tensor_type.shape.dim[1].dim_value = 32

    fixed = changed(export, tmp_path, fix)
    import_encoder(fixed, tmp_path / "model.onnx", 32)
    with pytest.raises(ModelFileError, match="has 32 where 64 are asked for"):
        import_encoder(fixed, tmp_path / "model.onnx", 64)


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_max_tokens": False}, "cls"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode": "cls"}, "cls"),
    ],
)
def test_pooling_is_that_of_sentence_transformers(
    tmp_path: Path, config: dict[str, object], mode: PoolingMode
) -> None:
    assert read_pooling(tmp_path) == Pooling()
    write_modules(tmp_path, "Transformer", "Pooling", pooling=config)
    assert read_pooling(tmp_path) == Pooling(mode)
    write_modules(tmp_path, "Transformer", "Pooling", "Normalize", pooling=config)
    assert read_pooling(tmp_path) == Pooling(mode, normalized=True)


@pytest.mark.parametrize(
    ("modules", "pooling", "reason"),
    [
        (["Transformer", "Pooling", "Dense"], {}, "2_Dense is a module of kind Dense"),
        (["Transformer", "Normalize"], {}, "its modules are Transformer, Normalize"),
        (["Transformer", "Pooling"], {"pooling_mode_max_tokens": True}, "pooling by max_tokens"),
        (
            ["Transformer", "Pooling"],
            {"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True},
            "pooling by max_tokens, cls_token",
        ),
    ],
)
def test_other_ways_to_a_vector_are_refused_by_name(
    tmp_path: Path, modules: list[str], pooling: dict[str, object], reason: str
) -> None:
    write_modules(tmp_path, *modules, pooling=pooling)
    with pytest.raises(ModelFileError, match=reason):
        read_pooling(tmp_path)


@pytest.mark.parametrize("text", ["{", '{"a": 1}', '[{"type": "x.Pooling", "path": "../.."}]'])
def test_odd_modules_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(ModelFileError, match=r"modules\.json"):
        read_pooling(tmp_path)


def test_special_tokens_are_the_prompt_template(export: Path, tmp_path: Path) -> None:
    assert prompt_template(export / "tokenizer.json") == ("<|begin_of_text|>", "")
    tokenizer = json.loads((export / "tokenizer.json").read_text())
    first, last = (each["content"] for each in tokenizer["added_tokens"][:2])
    special = {
        name: {"id": name, "ids": [number], "tokens": [name]}
        for number, name in enumerate((first, last))
    }
    single = [
        {"SpecialToken": {"id": first, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": last, "type_id": 0}},
    ]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special,
    }  # fmt: skip
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(tokenizer))
    assert prompt_template(path) == (first, last)
    (ids,) = TextTokens(path, (first, last), LENGTH).of(["a"])
    assert (ids[0], ids[-1]) == (0, 1)


def test_one_onnx_becomes_a_container(encoder_bundle: Path) -> None:
    container = GenAIContainer.load(encoder_bundle)
    assert container.embeds
    assert container.precision == "W8A16"
    embedding = container.embedding_config.embedding
    assert (embedding.context.ctx_size, embedding.context.embed_size) == (LENGTH, 144)
    assert embedding.context.n_vocab == 1280
    with pytest.raises(BuildError, match="holds a text encoder, which answers no prompts"):
        _ = container.genie_config


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"arn_cl_options.context_length": (64, 128)}, "an encoder has one, not 2"),
        ({"arn_cl_options.context_length": (256,)}, "256 is more than the 128 positions"),
        ({"split_model.num_splits": 2}, "an encoder is built in one part"),
    ],
)
def test_options_that_an_encoder_lacks_are_refused(
    export: Path, tmp_path: Path, options: dict[str, object], reason: str
) -> None:
    builder = GenAIBuilderFactory.create(export, cache_root=tmp_path)
    builder.set_targets(["SM8750:emulator"]).set_transformation_options(options)
    with pytest.raises(InvalidOptionError, match=reason):
        builder.plan()


def test_a_dialog_embeds_no_texts(tiny_bundle: Path) -> None:
    with pytest.raises(BuildError, match="holds a dialog, which embeds no texts"):
        _ = GenAIContainer.load(tiny_bundle).embedding_config


def test_cosine_of_equal_directions_is_one() -> None:
    a = np.array([3.0, 4.0], np.float32)
    assert cosine(a, 2 * a) == pytest.approx(1.0)
    assert cosine(a, np.zeros(2, np.float32)) == 0.0
