"""GGUF files as checkpoints: every family, every type, and damage."""

import json
import warnings
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from buildlib.builder.model_place import find_model
from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.error_base import QnnfarmError
from buildlib.errors import InputFileError, ModelFileError
from buildlib.gguf import GgufHeader
from buildlib.progress import WorkNote, telling
from plugins.gguf.reader import write_checkpoint
from tests.buildlib.checkpoint.odd_strings import ODD_STRINGS
from tests.plugins.gguf.gguf_files import CONVERTED, add_tokenizer, write_gguf, write_source

_DEQUANTIZED = [
    kind for kind in gguf.GGMLQuantizationType if kind in gguf.quants._type_traits
]  # the package has readers of these, and writers of fewer


@pytest.mark.parametrize("name", CONVERTED)
def test_what_llama_cpp_wrote_becomes_the_model_that_it_was_made_of(
    name: str, tmp_path: Path
) -> None:
    source = write_source(tmp_path / "source", name)
    path = write_gguf(tmp_path / "model.gguf", source, name)
    write_checkpoint(path, tmp_path / "made")
    made, original = Checkpoint.load(tmp_path / "made"), Checkpoint.load(source)
    assert made.config.model_dump() == original.config.model_dump()
    assert made.tensors.keys() == original.tensors.keys()
    for key, ref in made.tensors.items():
        values, expected = ref.numpy(), original.tensors[key].numpy()
        # Gemma's gains had 1 added to them, in float32.
        shifted = name.startswith("gemma") and key.endswith("norm.weight")
        np.testing.assert_allclose(values, expected, rtol=0, atol=2.4e-7 if shifted else 0)


def _rows(kind: gguf.GGMLQuantizationType) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Random blocks of a type; scales are whatever the bits say, but no NaN or infinity."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rows = np.random.default_rng(7).integers(0, 60, (64, 256 // block * size), np.uint8)
    return rows.astype(np.uint8)


@pytest.mark.parametrize("kind", _DEQUANTIZED, ids=lambda kind: kind.name)
def test_every_type_that_the_package_dequantizes(
    kind: gguf.GGMLQuantizationType, tmp_path: Path
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    raw = _rows(kind)
    writer.add_tensor("blk.0.ffn_up.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    rows = GgufHeader.read(tmp_path / "model.gguf").rows("blk.0.ffn_up.weight")
    assert rows.shape == (64, 256)
    order = np.array([3, 1, 63])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of numpy, about the numbers that random bits make
        expected = gguf.quants.dequantize(raw, kind)
    np.testing.assert_array_equal(rows[order].astype(np.float32), expected[order])


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_halves_stay_halves_and_quantized_weights_become_float(kind: str, tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", "qwen2-yarn")
    stored = gguf.GGMLQuantizationType[kind]
    path = write_gguf(tmp_path / "model.gguf", source, "qwen2-yarn", stored)
    write_checkpoint(path, tmp_path / "made")
    made = Checkpoint.load(tmp_path / "made").tensors["model.layers.1.mlp.up_proj.weight"]
    assert made.dtype == (kind if kind in {"F16", "BF16"} else "F32")
    weights = load_file(source / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    expected = gguf.quants.dequantize(gguf.quants.quantize(weights, stored), stored)
    np.testing.assert_array_equal(made.numpy().astype(np.float32), expected.astype(np.float32))


def _text() -> list[str]:
    return [" ".join(ODD_STRINGS), *ODD_STRINGS] * 3


def _byte_level(pattern: str) -> Tokenizer:
    """A BPE over bytes of our own text, put together as the published ones are."""
    tokenizer = Tokenizer(models.BPE())
    pieces: list[pre_tokenizers.PreTokenizer] = []
    if pattern == "digits":
        pieces = [pre_tokenizers.Digits(individual_digits=True)]
    pieces.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(pieces)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_text(), trainer)
    return tokenizer


def _write_bpe(path: Path, tokenizer: Tokenizer, pre: str) -> Path:
    model = json.loads(tokenizer.to_str())
    vocabulary = sorted(model["model"]["vocab"], key=model["model"]["vocab"].__getitem__)
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if number < 3 else 1 for number in range(len(vocabulary))])
    writer.add_token_merges([" ".join(pair) for pair in model["model"]["merges"]])
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")
    return _finish(writer, len(vocabulary))


def _finish(writer: gguf.GGUFWriter, size: int) -> Path:
    """Add a small model to a vocabulary, and write the file."""
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    shapes = {"token_embd": (size, 8), "output_norm": (8,)}
    layer = {"attn_norm": (8,), "ffn_norm": (8,), "ffn_gate": (8, 8), "ffn_up": (8, 8)}
    layer |= {"ffn_down": (8, 8)} | {f"attn_{one}": (8, 8) for one in ("q", "k", "v", "output")}
    names = {f"{name}.weight": shape for name, shape in shapes.items()}
    names |= {f"blk.0.{name}.weight": shape for name, shape in layer.items()}
    names |= {f"blk.0.attn_{one}.bias": (8,) for one in "qkv"}
    for name, shape in names.items():
        writer.add_tensor(name, np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(writer.path)  # type: ignore[arg-type]


@pytest.mark.parametrize(("pre", "pattern"), [("gpt-2", ""), ("smollm", "digits")])
def test_a_byte_level_tokenizer_is_the_one_it_was_made_of(
    pre: str, pattern: str, tmp_path: Path
) -> None:
    original = _byte_level(pattern)
    write_checkpoint(_write_bpe(tmp_path / "m.gguf", original, pre), tmp_path / "made")
    made = Tokenizer.from_file(str(tmp_path / "made" / "tokenizer.json"))
    different = [s for s in ODD_STRINGS if made.encode(s).ids != original.encode(s).ids]
    assert not different
    assert all(made.decode(made.encode(s).ids, skip_special_tokens=False) == s for s in ODD_STRINGS)
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    # bos of a family without one is not the file's either; both ends are kept
    assert (config.get("bos_token_id"), config["eos_token_id"]) == (None, [2, 0])
    generation = json.loads((tmp_path / "made" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, 0]


def test_a_sentencepiece_tokenizer_is_the_one_it_was_made_of(tmp_path: Path) -> None:
    bytes_ = [f"<0x{number:02X}>" for number in range(256)]
    original = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    original.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=["<unk>", "<s>", "</s>", *bytes_], show_progress=False
    )
    words = [word for text in _text() for word in text.split(" ") if len(word) < 30]
    original.train_from_iterator(words, trainer)
    model = json.loads(original.to_str())
    added = [one for one in model["added_tokens"] if one["id"] < 3]
    original = Tokenizer.from_str(json.dumps(model | {"added_tokens": added}))
    vocabulary = sorted(model["model"]["vocab"], key=model["model"]["vocab"].__getitem__)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen2")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(vocabulary)
    writer.add_token_scores([-float(number) for number in range(len(vocabulary))])
    kinds = [2, 3, 3, *([6] * 256), *([1] * (len(vocabulary) - 259))]
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    write_checkpoint(_finish(writer, len(vocabulary)), tmp_path / "made")
    made = Tokenizer.from_file(str(tmp_path / "made" / "tokenizer.json"))
    different = [s for s in ODD_STRINGS if made.encode(s).ids != [1, *original.encode(s).ids]]
    assert not different
    for text in ("Hello world", "  two  spaces", "你好 😀\n"):
        assert made.decode(made.encode(text).ids) == text


def test_a_gguf_is_read_once_and_keeps_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_source(tmp_path / "source", "olmo2")
    path = write_gguf(tmp_path / "Small-1B.Q8_0.gguf", source, "olmo2")
    heard: list[WorkNote] = []
    with telling(heard.append):
        place = find_model(path, cache_root=tmp_path / "cache")
    assert (place.name, place.folder.name, place.file) == ("Small-1B.Q8_0", "Small-1B.Q8_0", path)
    monkeypatch.setattr("plugins.gguf.reader.write_checkpoint", None)
    assert find_model(path, cache_root=tmp_path / "cache").path == place.path
    assert {work.name for work in heard} == {"read Small-1B.Q8_0.gguf"}
    shares = [int(work.words.partition("%")[0]) for work in heard if work.words]
    assert shares == sorted(shares)
    assert (shares[0] < 50, shares[-1], heard[-1].ended) == (True, 100, True)


def _damaged(tmp_path: Path, keys: dict[str, object], without: str = "") -> Path:
    name = "olmo2"
    path = write_gguf(
        tmp_path / "model.gguf", write_source(tmp_path / "s", name), name, without=without
    )
    reader = gguf.GGUFReader(path, "r+")
    for key, value in keys.items():
        field = reader.fields[f"{name}.{key}"]
        field.parts[field.data[0]][0] = value
    reader.data.flush()
    return path


@pytest.mark.parametrize(
    ("without", "keys", "told"),
    [
        ("", {"block_count": 3}, "it has no tensor for model.layers.2"),
        ("", {"block_count": 1}, "'blk.1.attn_k.bias' has no place in a olmo2"),
        ("", {"block_count": 1 << 31}, "it says that it has 2147483648 layers"),
        ("", {"attention.head_count": 7}, "num_attention_heads is not a multiple"),
        ("", {"embedding_length": 64}, "keys say"),
        ("blk.1.ffn_down.weight", {}, "it has no tensor for model.layers.1.mlp.down_proj.weight"),
        ("token_embd.weight", {}, "it has no matrix token_embd.weight"),
    ],
)
def test_keys_and_tensors_that_disagree_are_refused(
    without: str, keys: dict[str, object], told: str, tmp_path: Path
) -> None:
    path = _damaged(tmp_path, keys, without)
    with pytest.raises(QnnfarmError) as caught:
        write_checkpoint(path, tmp_path / "made")
    assert told in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    path = _damaged(tmp_path, {})
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(InputFileError, match="past the end of the file; get it again"):
        write_checkpoint(path, tmp_path / "made")


@pytest.mark.parametrize(
    ("architecture", "told"),
    [
        ("mamba", "a model of the architecture 'mamba'; known are baichuan, chatglm"),
        ("clip", "clip"),
    ],
)
def test_other_architectures_are_refused(architecture: str, told: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", architecture)
    add_tokenizer(writer, 16)
    with pytest.raises(ModelFileError, match=told):
        write_checkpoint(_finish(writer, 16), tmp_path / "made")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda w: w.add_tokenizer_model("bert"), "of the kind 'bert'"),
        (lambda w: w.add_tokenizer_model("gpt2"), r"cuts texts as '' does \(tokenizer.ggml.pre\)"),
        (lambda w: w.add_expert_count(8), "a mixture of experts"),
        (lambda w: w.add_uint16("split.count", 3), "llama-gguf-split --merge"),
    ],
)
def test_tokenizers_and_kinds_that_are_not_known_are_refused(
    change: "object", told: str, tmp_path: Path
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen2")
    add_tokenizer(writer, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        change(writer)  # type: ignore[operator]
    with pytest.raises(ModelFileError, match=told):
        write_checkpoint(_finish(writer, 16), tmp_path / "made")


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("gguf")
    return write_gguf(folder / "m.gguf", write_source(folder / "s", "olmo2"), "olmo2").read_bytes()


@given(data=st.data())
def test_any_damage_is_refused_or_read(
    content: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, 5000))] = data.draw(st.integers(0, 255))
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "m.gguf").write_bytes(bytes(damaged[: data.draw(st.integers(0, len(damaged)))]))
    try:
        write_checkpoint(folder / "m.gguf", folder / "made")
    except QnnfarmError as error:
        assert "\n" not in str(error)  # noqa: PT017
