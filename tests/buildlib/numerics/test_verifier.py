"""Correct stages pass; each kind of damage is found at its stage."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from buildlib.builder.build import BuildOutputs
from buildlib.checkpoint.config import load_config
from buildlib.encodings.files import load_encodings
from buildlib.errors import BuildError, ModelFileError
from buildlib.graph.files import link_into
from buildlib.graph.shape import GraphShape
from buildlib.numerics.comparison import FINITE, SAME_FLOAT, SideComparison, VerificationReport
from buildlib.numerics.runners import OnnxRunner, PartRunner
from buildlib.numerics.verifier import (
    StageModels,
    VerifyOptions,
    Version,
    sample_tokens,
    verify_outputs,
)
from buildlib.passes.arcl import convert_arcl
from buildlib.passes.split import split_model
from buildlib.quantize.qdq import apply_encodings
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain

OWN = GraphShape(16, 96)
SHAPES = (GraphShape(1, 96), OWN, GraphShape(1, 48), GraphShape(16, 48))
FEW = VerifyOptions(max_positions=20, continuation=3, n_threads=1)


@pytest.fixture(scope="module")
def models(tiny_export: Path, tmp_path_factory: pytest.TempPathFactory) -> StageModels:
    folder = tmp_path_factory.mktemp("stages")
    source = tiny_export / "model.onnx"
    encodings = load_encodings(tiny_export / "model.encodings")
    arcl = {shape: convert_arcl(source, shape, folder / f"{shape}.onnx") for shape in SHAPES}
    split = {shape: split_model(path, 2, folder) for shape, path in arcl.items()}
    qdq = {
        shape: [
            apply_encodings(part, encodings, folder / f"{part.stem}.qdq.onnx") for part in parts
        ]
        for shape, parts in split.items()
    }
    return StageModels(
        config=load_config(tiny_export / "config.json"),
        imported=dict.fromkeys(SHAPES, source),
        arcl=arcl,
        split=split,
        qdq=qdq,
    )


def changed(path: Path, folder: Path, change: Callable[[onnx.GraphProto], None]) -> Path:
    """A copy of a model with another graph over the same weights."""
    model = onnx.load(path, load_external_data=False)
    change(model.graph)
    target = folder / path.name
    target.write_bytes(model.SerializeToString())
    for weights in path.parent.glob("*.safetensors"):
        link_into(weights, folder)
    return target


def spoiled(path: Path, folder: Path, name: str) -> Path:
    """A copy of a model in which one norm is a little off."""

    def change(graph: onnx.GraphProto) -> None:
        (node,) = (node for node in graph.node if name in node.output)
        (epsilon,) = (one for one in node.attribute if one.name == "epsilon")
        epsilon.f *= 3e3

    return changed(path, folder, change)


def verified(models: StageModels, **changes: Any) -> VerificationReport:  # noqa: ANN401
    """The report of these models, without parts unless they are among the changes."""
    changes = {"split": None, "qdq": None} | changes
    return verify_outputs(dataclasses.replace(models, **changes), options=FEW)


def failed(report: VerificationReport) -> set[tuple[str, str]]:
    return {(one.side, one.where) for one in report.failures}


def test_correct_stages_pass(models: StageModels) -> None:
    reported: list[SideComparison] = []
    report = verify_outputs(models, options=FEW, on_comparison=reported.append)
    assert report.passed, report.failures
    assert tuple(reported) == report.rows
    assert [(one.side, one.where) for one in reported] == [
        (stage, f"ar{ar}_cl{cl}")
        for cl in (48, 96)
        for stage in ("arcl", "split", "quantize")
        for ar in (1, 16)
    ]
    by_key = {(one.side, one.where): one for one in reported}
    own = by_key["arcl", str(OWN)]
    assert (own.bound, own.found.relative, own.found.steps) == ("bit-exact", 0, 14)
    assert by_key["arcl", "ar1_cl48"].bound == "relative <= 1e-05"
    assert by_key["arcl", "ar1_cl48"].found.relative > 0  # else AR 1 would not have been run at all
    for one in reported:
        if one.side == "split":
            assert (one.bound, one.found.relative) == ("bit-exact", 0)
        if one.side == "quantize":
            assert 15 < one.found.sqnr_db < 80
        else:
            assert one.found.top1 == 1


def test_a_spoiled_stage_fails_there_and_not_after(models: StageModels, tmp_path: Path) -> None:
    assert models.split is not None
    bad = spoiled(models.split[OWN][1], tmp_path, "layer_1_mlp_norm")
    split = {**models.split, OWN: [models.split[OWN][0], bad]}
    report = verified(models, split=split, qdq=models.qdq)
    assert {stage for stage, _ in failed(report)} == {"split"}
    assert ("split", str(OWN)) in failed(report)
    assert report.failures[0].found.relative > 1e-6
    arcl = {**models.arcl, GraphShape(1, 48): spoiled(
        models.arcl[GraphShape(1, 48)], tmp_path, "layer_0_attention_norm"
    )}  # fmt: skip
    subjects = failed(verified(models, arcl=arcl, split=models.split))
    assert ("arcl", "ar1_cl48") in subjects
    assert all(subject.endswith("cl48") for _, subject in subjects)


def test_swapped_caches_are_found_though_each_call_is_right(
    models: StageModels, tmp_path: Path
) -> None:
    """As when encodings or names of two layers are mixed up: it shows from the second call on."""
    swap = {"past_key_0_out": "past_key_1_out", "past_key_1_out": "past_key_0_out"}

    def exchange(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            for names in (node.output, node.input):
                names[:] = [swap.get(name, name) for name in names]

    decode = GraphShape(1, 96)
    arcl = {decode: changed(models.arcl[decode], tmp_path, exchange), OWN: models.arcl[OWN]}
    assert failed(verified(models, arcl=arcl)) == {("arcl", str(decode))}


def test_weights_that_are_no_numbers_fail_every_bound(models: StageModels, tmp_path: Path) -> None:
    def poison(graph: onnx.GraphProto) -> None:
        (gain,) = (tensor for tensor in graph.initializer if tensor.name == "model.norm.weight")
        values = np.full(list(gain.dims), np.nan, np.float16)
        gain.CopyFrom(onnx.numpy_helper.from_array(values, gain.name))

    path = changed(models.imported[OWN], tmp_path, poison)
    report = verified(models, imported={OWN: path}, arcl={OWN: path})
    assert [one.passed for one in report.rows] == [False]
    assert "not finite" in report.rows[0].note


def test_each_version_is_compared_with_the_one_before_it(
    models: StageModels, tmp_path: Path
) -> None:
    """A stage that may change weights is not what an import is held against."""
    before = models.imported[OWN]
    after = spoiled(before, tmp_path, "layer_0_mlp_norm")
    stages = {"import": SAME_FLOAT, "optimize": FINITE}
    opened: list[PartRunner] = []

    def open_before() -> PartRunner:
        opened.append(OnnxRunner(before, n_threads=1, plain=True))
        return opened[-1]

    files = {"imported": {OWN: after}, "arcl": {OWN: after}}
    versions = [Version(stage, bound, open_before) for stage, bound in stages.items()]
    report = verified(models, **files, earlier={after: versions})
    assert len(opened) == 2
    assert report.passed, report.failures
    assert [row.side for row in report.rows] == ["import", "optimize", "arcl"]
    assert report.rows[0].found.relative == 0 < report.rows[1].found.relative
    report = verified(models, **files, earlier={after: versions[:1]})
    assert [row.side for row in report.failures] == ["import"]


def test_samples_stay_inside_the_vocabulary(models: StageModels) -> None:
    config = models.config
    assert sample_tokens(config, 50) == sample_tokens(config, 50)
    assert set(sample_tokens(config, 5000)) <= set(range(config.vocab_size))
    tiny = config.model_copy(update={"vocab_size": 2})
    assert set(sample_tokens(tiny, 50)) <= {0, 1}
    for tokens in ([config.vocab_size], [-1], []):
        with pytest.raises(BuildError, match="vocabulary"):
            verify_outputs(models, tokens, options=FEW)


def test_a_model_without_a_mask_is_refused(models: StageModels, tmp_path: Path) -> None:
    def rename(graph: onnx.GraphProto) -> None:
        for value in graph.input:
            value.name = value.name.replace("attention_mask", "mask")
        for node in graph.node:
            node.input[:] = [name.replace("attention_mask", "mask") for name in node.input]

    path = changed(models.imported[OWN], tmp_path, rename)
    with pytest.raises(ModelFileError, match="attention mask"):
        verified(models, imported=dict.fromkeys(SHAPES, path))


@pytest.mark.variant
def test_the_emulator_computes_what_the_quantized_model_does(
    reference_outputs: BuildOutputs,
) -> None:
    shapes = tuple(reference_outputs.float_models)
    models = StageModels(
        config=load_config(reference_outputs.export / "config.json"),
        imported=dict.fromkeys(shapes, reference_outputs.export / "model.onnx"),
        arcl=reference_outputs.float_models,
        qdq=reference_outputs.qdq_parts,
        binaries=reference_outputs.binaries,
    )
    options = VerifyOptions(max_positions=12, continuation=2, n_threads=1, soc_model=69)
    report = verify_outputs(models, emulator=OrtQnnToolchain(), options=options)
    assert report.passed, report.failures
    compiled = [one for one in report.rows if one.side == "compile"]
    assert [one.where for one in compiled] == ["ar1_cl192", "ar32_cl192"]
    for one in compiled:
        assert one.found.sqnr_db > 45
        assert one.found.top1 > 0.95
