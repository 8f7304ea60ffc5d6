"""The bits that are asked for are those that are built, and the container tells which they are."""

import re
import shutil
import warnings
from collections.abc import Callable
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
from tests.builders import builder_for

ACT, PARAM = "quantization.act_bitwidth", "quantization.param_bitwidth"
KV = "quantization.kv_bitwidth"
BLOCK = "quantization.lpbq_block_size"
TECHNIQUES = "quantization.techniques"
FEW = VerifyOptions(max_positions=24, continuation=2)

SIZES = {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
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


@pytest.mark.needs("libatomic1")
def test_a_checkpoint_has_the_bits_that_are_asked_for(
    wide: Path, tiny_text: str, tmp_path: Path
) -> None:
    """Both at once; weights alone are asked for below, and neither is the default."""
    builder = of(wide, tiny_text, tmp_path, {PARAM: 4, ACT: 8, TECHNIQUES: ()})
    container = builder.build()
    assert container.precision == "W4A8"
    stored = {
        key: str(value).partition(": ")[0]
        for key, value in container.metadata.model.quantization.items()
    }
    assert stored["weights"] == "int4 LPBQ"
    assert stored["head"] == "int8 per channel"
    assert stored["embedding"] == "uint8 per tensor"
    assert stored["kv_cache"] == "uint8"
    counts = weights_in_dlcs(builder.plan())
    assert (counts["int8"], counts["int4"]) == (64 * 300, LINEAR)


def test_the_default_is_w8a16(tiny_bundle: Path) -> None:
    container = GenAIContainer.load(tiny_bundle)
    assert container.precision == "W8A16"
    assert "uint16: " in str(container.metadata.model.quantization["activations"])


@pytest.mark.variant
@pytest.mark.needs("libatomic1")
def test_lpbq_is_built_where_the_width_allows(wide: Path, tiny_text: str, tmp_path: Path) -> None:
    builder = of(wide, tiny_text, tmp_path, {PARAM: 4, BLOCK: 16})
    report = builder.verify(FEW, emulator=True)
    assert report.passed, report.rows
    container = builder.build()
    assert container.precision == "W4A16"
    assert str(container.metadata.model.quantization["weights"]).startswith("int4 LPBQ: ")
    assert weights_in_dlcs(builder.plan())["int4"] == LINEAR


@pytest.mark.needs("libatomic1")
def test_lpbq_that_cannot_be_had_is_refused_by_name(
    wide: Path, one_layer: Path, tiny_text: str, tmp_path: Path
) -> None:
    narrow = of(one_layer, tiny_text, tmp_path, {PARAM: 4, BLOCK: 16})
    other = of(wide, tiny_text, tmp_path, {PARAM: 4, BLOCK: 64})
    for builder, reason in (
        (narrow, r"_proj.weight has 24 inputs.* 32 "),
        (other, r"down_proj.* 96 inputs, which 64 does not"),
    ):
        with pytest.raises(InvalidOptionError, match=reason) as caught:
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


@pytest.mark.needs("libatomic1")
@pytest.mark.parametrize(
    ("keep", "options", "precision", "warned"),
    [
        pytest.param("", {PARAM: 4, ACT: 8, KV: 16}, "W4A8KV16", {}, marks=pytest.mark.variant),
        (
            ".",
            {PARAM: 4, ACT: 8, KV: 16},
            "W8A16",
            {
                f"{ACT}=8": "7 activations of 16 bits",
                f"{KV}=16": "2 keys and values of 8 bits",
                f"{PARAM}=4": "7 weights of 8 bits",
            },
        ),
        pytest.param(
            "^(?!.*mlp)",
            {PARAM: 4},
            "W4/8A16",
            {f"{PARAM}=4": "4 weights of 8 bits"},
            marks=pytest.mark.variant,
        ),
    ],
    ids=["none", "all", "some"],
)
def test_encodings_of_an_onnx_decide_and_other_bits_are_told(
    one_layer_export: Path, tiny_text: str, build_cache: Path, tmp_path: Path,
    keep: str, options: dict[str, object], precision: str, warned: dict[str, str],
) -> None:  # fmt: skip
    folder = onnx_folder(
        one_layer_export, tmp_path / "model", lambda name: bool(keep and re.match(keep, name))
    )
    builder = of(folder, tiny_text, build_cache, options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ModelWarning)
        assert builder.build().precision == precision
    told = [one for one in caught if issubclass(one.category, ModelWarning)]
    lines = [
        text for one in told if not (text := str(one.message)).startswith("quantization costs")
    ]
    assert [line.partition(" ")[0] for line in lines] == list(warned)
    assert all(warned[line.partition(" ")[0]] in line and "\n" not in line for line in lines)
