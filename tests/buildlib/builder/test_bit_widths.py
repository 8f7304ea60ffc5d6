"""The bits that are asked for are those that are built, and the container tells which they are."""

import shutil
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from buildlib.builder.build import Build
from buildlib.checkpoint.layout import ENCODINGS_FILE
from buildlib.container.container import GenAIContainer
from buildlib.container.dlc import inspect_dlc
from buildlib.encodings.files import load_encodings, save_encodings
from buildlib.errors import InvalidOptionError, ModelWarning
from buildlib.genai import GenAIBuilderHTP
from buildlib.numerics.verifier import VerifyOptions
from suites.models import tiny_llama
from tests.builders import builder_for

ACT, PARAM = "quantization.act_bitwidth", "quantization.param_bitwidth"
BLOCK = "quantization.lpbq_block_size"
TECHNIQUES = "quantization.techniques"
FEW = VerifyOptions(max_positions=24, continuation=2)

SIZES = {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "num_attention_heads": 4,
}
LINEAR = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96
"""Numbers in the linear layers of a model of these sizes: q, o, k, v, gate, up, down."""


@pytest.fixture(scope="module")
def wide(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose inputs are whole blocks of 32."""
    return make_checkpoint(tmp_path_factory.mktemp("wide"), **SIZES)


def of(
    folder: Path, text: str | None, cache: Path, options: dict[str, object], *, ar: int = 16
) -> GenAIBuilderHTP:
    return builder_for(folder, cache, [1], [6 * ar], None, text=text).set_options(options)


def weights_in_dlcs(build: Build) -> dict[str, int]:
    """Numbers of each type in the constants of the decode graph."""
    first = next(iter(build.outputs().dlcs.values()))
    counts: dict[str, int] = {}
    for dlc in first:
        for graph in inspect_dlc(dlc).graphs:
            for kind, count in graph.weight_elements.items():
                counts[kind] = counts.get(kind, 0) + count
    return counts


def check_bits(
    builder: GenAIBuilderHTP, precision: str, linear: tuple[str, int], head: int
) -> GenAIContainer:
    """Build it, and compare the bits that are told with those in the graphs.

    Args:
        linear: type and number of the weights in linear layers.
        head: number of the head's weights.
    """
    container = builder.build()
    assert container.precision == precision
    stored = container.metadata.model.quantization
    activations = f"uint{precision.partition('A')[2]}"
    kind, number = linear
    assert str(stored["weights"]).startswith(f"{kind} per channel: ")
    assert stored["head"] == "int8 per channel: 1"
    assert stored["embedding"] == f"{activations} per tensor: 1"
    assert str(stored["kv_cache"]).startswith("uint8: ")
    counts = weights_in_dlcs(builder.plan())
    assert counts["int8"] == head + (number if kind == "int8" else 0)
    assert counts.get("int4", 0) == (number if kind == "int4" else 0)
    return container


@pytest.mark.needs("libatomic1")
def test_a_checkpoint_has_the_bits_that_are_asked_for(
    wide: Path, tiny_text: str, tmp_path: Path
) -> None:
    """Both at once; weights alone are asked for below, and neither is the default."""
    builder = of(wide, tiny_text, tmp_path, {PARAM: 4, ACT: 8, TECHNIQUES: ()})
    report = builder.verify(FEW, emulator=True)
    # The bounds are those of trained models, whose activations are not as wide.
    heard = {one.stage: one.sqnr_db for one in report.comparisons}
    assert "quantize" in heard
    assert heard["compile"] > 10, report.to_json()
    check_bits(builder, "W4A8", ("int4", LINEAR), 64 * 300)


def test_the_default_is_w8a16(tiny_bundle: Path) -> None:
    container = GenAIContainer.load(tiny_bundle)
    assert container.precision == "W8A16"
    assert "uint16: " in str(container.metadata.model.quantization["activations"])


@pytest.mark.needs("libatomic1")
@pytest.mark.parametrize("block", [16, 64])
def test_lpbq_is_built_where_the_width_allows(
    block: int, make_checkpoint: Callable[..., Path], tiny_text: str, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path / "model", **SIZES | {"intermediate_size": 128})
    builder = of(folder, tiny_text, tmp_path / "cache", {PARAM: 4, BLOCK: block})
    report = builder.verify(FEW, emulator=True)
    assert report.passed, report.to_json()
    container = builder.build()
    assert container.precision == "W4A16"
    assert str(container.metadata.model.quantization["weights"]).startswith("int4 LPBQ: ")
    assert weights_in_dlcs(builder.plan())["int4"] == LINEAR + 3 * 64 * 32


@pytest.mark.needs("libatomic1")
def test_blocks_that_do_not_divide_the_inputs_are_refused(
    wide: Path, tiny_text: str, tmp_path: Path
) -> None:
    builder = of(wide, tiny_text, tmp_path / "cache", {PARAM: 4, BLOCK: 64})
    with pytest.raises(InvalidOptionError, match=r"down_proj.* 96 inputs, which 64 does not"):
        builder.build()


@pytest.mark.needs("libatomic1")
def test_lpbq_that_cannot_be_had_is_refused_by_name(tmp_path: Path) -> None:
    builder = of(tiny_llama.folder(), None, tmp_path, {PARAM: 4, BLOCK: 16}, ar=32)
    with pytest.raises(InvalidOptionError, match=r"q_proj.weight has 144 inputs.* 32 ") as caught:
        builder.build()
    assert caught.value.key == BLOCK
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("*.dlc"))


def onnx_folder(export: Path, folder: Path, keep: Callable[[str], bool]) -> Path:
    """The export with those of its encodings alone whose names are kept."""
    shutil.copytree(export, folder)
    given = load_encodings(folder / ENCODINGS_FILE)
    kept = {
        group: tuple(e for e in getattr(given, group) if keep(e.name))
        for group in ("activation_encodings", "param_encodings")
    }
    (folder / ENCODINGS_FILE).unlink()
    if any(kept.values()):
        save_encodings(given.model_copy(update=kept), folder / ENCODINGS_FILE)
    return folder


def built(builder: GenAIBuilderHTP) -> tuple[str | None, list[str]]:
    """Precision of the container, and the warnings on the way to it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ModelWarning)
        precision = builder.build().precision
    return precision, [str(one.message) for one in given_only(caught)]


def given_only(
    caught: Iterable[warnings.WarningMessage],
) -> list[warnings.WarningMessage]:
    return [one for one in caught if issubclass(one.category, ModelWarning)]


@pytest.mark.needs("libatomic1")
def test_an_onnx_without_encodings(tiny_export: Path, tiny_text: str, tmp_path: Path) -> None:
    folder = onnx_folder(tiny_export, tmp_path / "model", lambda _: False)
    options: dict[str, object] = {PARAM: 4, ACT: 8}
    assert built(of(folder, tiny_text, tmp_path / "cache", options)) == ("W4A8", [])


@pytest.mark.needs("libatomic1")
def test_encodings_decide_and_what_was_asked_is_told(tiny_export: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert built(of(tiny_export, None, cache, {PARAM: 8, ACT: 16})) == ("W8A16", [])
    precision, told = built(of(tiny_export, None, cache, {PARAM: 4, ACT: 8}))
    assert precision == "W8A16"
    said = "is for what has no encodings: model.encodings gives 14"
    end = "in linear layers, which stay so"
    assert told == [
        f"{ACT}=8 {said} activations of 16 bits {end}",
        f"{PARAM}=4 {said} weights of 8 bits {end}",
    ]
    assert all("\n" not in line for line in told)


@pytest.mark.needs("libatomic1")
def test_some_encodings_make_a_mixed_model(
    tiny_export: Path, tiny_text: str, tmp_path: Path
) -> None:
    folder = onnx_folder(tiny_export, tmp_path / "model", lambda name: ".mlp." not in name)
    precision, (line,) = built(of(folder, tiny_text, tmp_path / "cache", {PARAM: 4}))
    assert precision == "W4/8A16"
    assert "model.encodings gives 8 weights of 8 bits" in line
