"""What a build says of the loss of its quantization, and what it does about it."""

from pathlib import Path

import pytest

from buildlib.builder.model_folder import check_loss, load_loss, loss_windows
from buildlib.builder.sources import CheckpointSource
from buildlib.builder.stages.author import AuthorModel
from buildlib.builder.stages.complete_encodings import CompleteEncodings
from buildlib.cache.layout import CacheEntry
from buildlib.checkpoint.config import load_config
from buildlib.container.manifest import LossRecord
from buildlib.encodings.files import load_encodings
from buildlib.errors import InvalidOptionError, LossTooLargeError, ModelWarning
from buildlib.graph.shape import GraphShape
from buildlib.numerics.evaluation import evaluate_model, record_float
from buildlib.numerics.host_loop import HostLoop
from buildlib.numerics.runners import OnnxRunner
from buildlib.quantize.options import QuantizationOptions
from buildlib.quantize.qdq import apply_encodings
from suites.models import tiny_llama

SHAPE = GraphShape(32, 192)
TEXT = (tiny_llama.folder() / "text/calibration.txt").read_text("utf-8")


def entry(folder: Path) -> CacheEntry:
    folder.mkdir(parents=True, exist_ok=True)
    return CacheEntry(folder.name, folder, folder.name, reused=False)


@pytest.fixture(scope="module")
def outliers(outlier_model: Path, tmp_path_factory: pytest.TempPathFactory) -> CacheEntry:
    """The model with outliers in float, without the rescaling of keys and values."""
    made = entry(tmp_path_factory.mktemp("loss") / "float")
    AuthorModel(CheckpointSource(outlier_model, TEXT), {}, SHAPE).run(made.folder)
    return made


def complete(
    model: CacheEntry, into: Path, *, text: str = TEXT, kv_bits: int | None = None
) -> tuple[LossRecord, dict[str, int]]:
    """Calibrate a model; return its loss, and the bits of its tensors."""
    given = {"kv_bitwidth": kv_bits, "calibration_tokens": 384}
    options = QuantizationOptions.model_validate(given)
    made = entry(into)
    CompleteEncodings(model, CheckpointSource(model.folder, text), options, model).run(made.folder)
    loss = load_loss(into)
    assert loss is not None
    bits = load_encodings(into / "model.encodings").by_name()
    return loss, {name: encoding.bw for name, encoding in bits.items()}


@pytest.fixture(scope="module")
def kv8(outliers: CacheEntry) -> tuple[Path, LossRecord, dict[str, int]]:
    """The same with keys and values of 8 bits: folder, loss, bits of tensors."""
    folder = outliers.folder.with_name("kv8")
    return folder, *complete(outliers, folder, kv_bits=8)


@pytest.mark.variant
def test_the_loss_is_that_of_the_quantized_model_and_names_its_remedies(
    outliers: CacheEntry, kv8: tuple[Path, LossRecord, dict[str, int]], tmp_path: Path
) -> None:
    folder, loss, bits = kv8
    assert bits["past_key_0_in"] == bits["past_value_3_out"] == 8
    config = load_config(outliers.folder / "config.json")
    windows = loss_windows(outliers.folder, TEXT)
    quantized = load_encodings(folder / "model.encodings")
    qdq = apply_encodings(folder / "model.onnx", quantized, tmp_path / "qdq.onnx")
    with (
        record_float(outliers.folder / "model.onnx", config, windows) as reference,
        HostLoop({SHAPE.ar: [OnnxRunner(qdq)]}, config) as loop,
    ):
        judge = evaluate_model(loop, reference)
    assert loss.kl_divergence == pytest.approx(judge.kl, rel=0.05)
    assert loss.top1_agreement == pytest.approx(judge.top1, abs=0.02)
    assert loss.tokens == judge.steps == 512
    assert list(loss.kinds)[:2] in (["key", "value"], ["value", "key"])
    assert all(loss.kinds[kind] > 0.05 for kind in ("key", "value"))
    assert all(loss.kinds[kind] < 0.02 for kind in ("weight", "residual", "activation"))
    [keys] = [line for line in loss.remarks if "keys reach" in line]
    assert keys.startswith("layer 0: keys reach 155, median 0.85; 8 bits leave most of them 1.3")
    assert keys.endswith(": quantization.kv_bitwidth=16")
    assert len(loss.remarks) == 2
    with pytest.warns(ModelWarning, match=r"costs mine much: KL 0\.2.*kv_bitwidth=16"):
        check_loss(folder, "mine", None)
    with pytest.raises(LossTooLargeError, match=r"mine loses more than max_kl=0\.1: KL 0\.2.*16"):
        check_loss(folder, "mine", 0.1)


def test_a_cache_of_8_bits_that_loses_much_gets_16(outliers: CacheEntry, tmp_path: Path) -> None:
    loss, bits = complete(outliers, tmp_path / "chosen")
    names = ("past_key_0_in", "past_value_3_out", "layer_1_keys", "layer_2_values")
    assert [bits[name] for name in names] == [16] * 4
    assert loss.kl_divergence < 0.03
    assert not {"key", "value"} & loss.kinds.keys()
    assert "in 8 they cost a KL divergence of 0." in loss.cache_remark
    size = 192 * 512  # bytes of a token in four layers, two heads of 32 for keys and values
    assert f"{size / 1000:.3g} kB more" in loss.cache_remark
    check_loss(tmp_path / "chosen", "mine", 0.03)


@pytest.mark.variant
def test_bits_that_hold_are_not_talked_about(tmp_path: Path) -> None:
    made, folder = entry(tmp_path / "float"), tmp_path / "done"
    AuthorModel(CheckpointSource(tiny_llama.folder(), TEXT), {}, SHAPE).run(made.folder)
    loss, bits = complete(made, folder)
    assert loss.kl_divergence < 0.002
    assert (loss.lines, loss.kinds, bits["past_key_0_in"]) == ((), {}, 8)
    (folder / "loss.json").unlink()
    check_loss(folder, "mine", None)
    with pytest.raises(InvalidOptionError, match=r"max_kl.*no calibration text"):
        check_loss(folder, "mine", 1.0)


@pytest.mark.variant
def test_encodings_of_the_users_own_stay(
    kv8: tuple[Path, LossRecord, dict[str, int]], tmp_path: Path
) -> None:
    loss, bits = complete(entry(kv8[0]), tmp_path / "done")
    assert bits["past_key_0_in"] == 8
    assert [line for line in loss.remarks if "encodings more bits" in line] == list(loss.remarks)
    assert loss.cache_remark == ""
