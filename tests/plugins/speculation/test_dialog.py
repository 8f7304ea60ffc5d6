"""Speculating dialogs: what Genie's own parser takes, and what is refused before it."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from buildlib.builder.speculative_config import (
    EagletBuilderConfig,
    LadeBuilderConfig,
    SpdBuilderConfig,
    SpeculativeConfig,
    SsdBuilderConfig,
)
from buildlib.container.container import GenAIContainer
from buildlib.container.genie_config import (
    Context,
    Embedding,
    GenieConfig,
    QuantParam,
    basic_dialog,
)
from buildlib.container.genie_engine import Lora, LoraAdapter
from buildlib.container.genie_validator import check_genie_text
from buildlib.container.writer import ContainerFile
from buildlib.errors import ContainerError, InvalidOptionError
from buildlib.targets import parse_target
from plugins.speculation.dialog import PlainDialog, Speculation, speculate
from suites.models import tiny_llama
from tests.repackaged import repackage

EMULATOR = parse_target("SM8750:emulator")


def plain(size: int = 192, n_vocab: int = 1280) -> GenieConfig:
    return basic_dialog(
        context=Context(size=size, n_vocab=n_vocab, bos_token=0, eos_token=1),
        head_dim=24,
        rotary_dim=24,
        rope_theta=10000.0,
        rope_scaling=None,
        ctx_bins=("m_part_1_of_2.bin", "m_part_2_of_2.bin"),
        emulator=True,
    )


def speculated(
    config: GenieConfig,
    how: SpeculativeConfig,
    ars: tuple[int, ...],
    draft_bins: Sequence[str] = (),
    draft_vocab: int | None = None,
) -> Speculation:
    """Of a model for the emulator with the reference model's tokenizer."""
    tokenizer = tiny_llama.folder() / "tokenizer.json"
    plain = PlainDialog(config, EMULATOR, tokenizer)
    return speculate(plain, how, ars, draft_bins, draft_vocab)


def judged(config: GenieConfig) -> GenieConfig:
    """Genie takes it, and so does our model of it."""
    check_genie_text(config.to_json().encode(), "genie_config.json")
    assert GenieConfig.from_json(config.to_json()) == config
    return config


def test_lookahead() -> None:
    result = speculated(plain(), LadeBuilderConfig(), (1, 64))
    assert judged(result.genie_config).dialog.type == "lade"
    assert not result.files
    with pytest.raises(InvalidOptionError, match="calls of 64 tokens; the largest AR is 32"):
        speculated(plain(), LadeBuilderConfig(), (1, 32))


def test_a_draft_model(tiny_bundle: Path) -> None:
    result = speculated(plain(), SpdBuilderConfig(draft_container=tiny_bundle), (1, 32))
    config = judged(result.genie_config)
    assert config.ctx_bins == ("m_part_1_of_2.bin", "m_part_2_of_2.bin")
    assert all(path.is_file() and path.parent == tiny_bundle for path in result.files.values())
    assert set(result.files) == {f"draft/{path.name}" for path in result.files.values()}
    assert set(result.files) <= set(config.referenced_files)
    with pytest.raises(InvalidOptionError, match="calls of 41 tokens; the largest AR is 32"):
        speculated(plain(), SpdBuilderConfig(draft_container=tiny_bundle, draft_len=40), (1, 32))
    with pytest.raises(InvalidOptionError, match=r"another context length \(192, the model 256\)"):
        speculated(plain(size=256), SpdBuilderConfig(draft_container=tiny_bundle), (1, 32))


def test_eaglet_has_a_draft_head(tmp_path: Path) -> None:
    how = EagletBuilderConfig(draft_model_path=tmp_path / "draft.onnx")
    with pytest.raises(InvalidOptionError, match=r"draft_model_path.*there is no file"):
        speculated(plain(), how, (1, 32))
    (tmp_path / "draft.onnx").write_bytes(b"")
    config = judged(speculated(plain(), how, (1, 32), ["draft/head.bin"]).genie_config)
    assert config.dialog.eaglet is not None
    assert config.dialog.eaglet.max_tokens_target_can_evaluate == 32
    assert "draft/head.bin" in config.referenced_files
    with pytest.raises(InvalidOptionError, match="calls of 33 tokens; the largest AR is 32"):
        speculated(plain(), how.model_copy(update={"max_tokens_target_can_evaluate": 33}), (1, 32))


def test_a_draft_that_knows_fewer_tokens_names_them(tmp_path: Path) -> None:
    draft, names = tmp_path / "draft.onnx", tmp_path / "map.json"
    draft.write_bytes(b"")

    def of(how: EagletBuilderConfig) -> Speculation:
        return speculated(plain(), how, (1, 32), ["draft/head.bin"], 3)

    with pytest.raises(InvalidOptionError, match="the draft knows 3 tokens of 1280; name a file"):
        of(EagletBuilderConfig(draft_model_path=draft))
    how = EagletBuilderConfig(draft_model_path=draft, draft_token_map=names)
    for text, message in (("{}", "no JSON list"), ("[0, 1, 1280]", "below 1280"), ("[5]", "1 ids")):
        names.write_text(text)
        with pytest.raises(InvalidOptionError, match=message):
            of(how)
    names.write_text("[5, 900, 7]")
    result = of(how)
    config = judged(result.genie_config)
    assert result.files == {"draft/draft_token_map.json": names}
    assert config.dialog.context.draft_n_vocab == 3
    assert "draft/draft_token_map.json" in config.referenced_files


@pytest.mark.parametrize(("branches", "tokens"), [((3, 2), 30), ((8,), 18), ((2, 2, 2), 60)])
def test_branches_that_do_not_fit_the_graphs(
    branches: tuple[int, ...], tokens: int, tmp_path: Path
) -> None:
    """Genie hangs where (1 + b1 + b1*b2 + ...) * (1 + number of branches) is beyond AR."""
    (tmp_path / "ssd.pt").write_bytes(b"")
    how = SsdBuilderConfig(ssd_tensor_file=tmp_path / "ssd.pt", branches=branches)
    assert how.tokens_per_step == tokens
    config = judged(speculated(plain(), how, (1, tokens)).genie_config)
    assert "forecast-prefix" in config.referenced_files
    with pytest.raises(InvalidOptionError, match=f"branches.*calls of {tokens} tokens"):
        speculated(plain(), how, (1, tokens - 1))


def test_more_branches_than_forecast_tokens(tmp_path: Path) -> None:
    how = SsdBuilderConfig(ssd_tensor_file=tmp_path, branches=(1, 1, 1, 1, 1))
    with pytest.raises(InvalidOptionError, match="5 branches of 4 forecast tokens"):
        speculated(plain(), how, (1, 64))


def test_a_draft_that_does_not_fit(tiny_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match=r"speculative_config\.draft_container"):
        speculated(plain(), SpdBuilderConfig(draft_container=tmp_path / "none"), (1, 32))
    with pytest.raises(ContainerError):
        speculated(plain(), SpdBuilderConfig(draft_container=tmp_path), (1, 32))
    how = SpdBuilderConfig(draft_container=tiny_bundle)
    phone = PlainDialog(plain(), parse_target("SM8750"), tiny_bundle / "tokenizer.json")
    with pytest.raises(InvalidOptionError, match=r"another target \(SM8750:emulator, the model SM"):
        speculate(phone, how, (1, 32))
    # As many tokens are not the same tokens: the text would be none.
    values = json.loads((tiny_bundle / "tokenizer.json").read_text("utf-8"))
    vocabulary = values["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    other = tmp_path / "tokenizer.json"
    other.write_text(json.dumps(values), "utf-8")
    with pytest.raises(InvalidOptionError, match=r"draft_container.*tokenizer with other tokens"):
        speculate(PlainDialog(plain(), EMULATOR, other), how, (1, 32))


def test_a_draft_with_a_table_of_its_own(tiny_bundle: Path, tmp_path: Path) -> None:
    """Its binaries take rows of its table, which a dialog of two engines has no place for."""
    bundle = GenAIContainer.load(tiny_bundle)
    (tmp_path / "rows").write_bytes(b"rows")
    config = bundle.genie_config.with_embedding(TABLE)
    rows = {"embedding_weights.raw": ContainerFile(tmp_path / "rows", "embedding")}
    folder = repackage(bundle, config, tmp_path / "draft", rows).path
    with pytest.raises(InvalidOptionError, match=r"draft_container.*table of its own"):
        speculated(plain(), SpdBuilderConfig(draft_container=folder), (1, 32))


@given(st.integers(1, 40), st.integers(2, 12), st.integers(1, 40), st.sampled_from([16, 64, 128]))
def test_lookahead_fits_the_graphs_or_is_refused(
    window: int, ngram: int, gcap: int, ar: int
) -> None:
    how = LadeBuilderConfig(window=window, ngram=ngram, gcap=gcap)
    fits = (window + gcap) * (ngram - 1) <= ar
    try:
        speculated(plain(), how, (1, ar))
    except InvalidOptionError:
        assert not fits
    else:
        assert fits


LORA = Lora(
    lora_version=1, alpha_tensor_name="lora_alpha", adapters=(LoraAdapter(name="a", path="lora/a"),)
)
TABLE = Embedding(
    type="lut",
    lut_path="embedding_weights.raw",
    size=144,
    datatype="ufixed16",
    quant_param=QuantParam(scale=0.5, offset=-3),
)


def test_table_and_adapters(tiny_bundle: Path) -> None:
    config = judged(plain().with_embedding(TABLE).with_lora(LORA))
    assert {"embedding_weights.raw", "lora/a"} <= set(config.referenced_files)
    assert judged(config.with_dialog(max_num_tokens=3)).dialog.embedding == TABLE
    spd = speculated(config, SpdBuilderConfig(draft_container=tiny_bundle), (1, 32)).genie_config
    adapted = [engine.role for engine in judged(spd).dialog.engines if engine.model.lora]
    assert adapted == ["target"]


def test_a_table_says_what_its_integers_mean() -> None:
    for datatype, grid in (("float32", TABLE.quant_param), ("ufixed8", None)):
        with pytest.raises(ValidationError, match="quant-param"):
            Embedding(type="lut", lut_path="t", size=1, datatype=datatype, quant_param=grid)  # type: ignore[arg-type]
