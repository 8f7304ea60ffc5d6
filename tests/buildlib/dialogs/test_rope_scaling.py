"""Genie turns queries and keys by the frequencies that it is told."""

import json
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from buildlib.container.genie_config import GenieConfig
from buildlib.encodings.attachment import inherit
from buildlib.graph import interface
from buildlib.passes.base import load_with_encodings, save_with_encodings
from tests.buildlib.dialogs.genie_lab import GenieLab


def test_factors_of_each_frequency_are_the_scaling_that_they_stand_for(
    genie_lab: GenieLab, plain_dialog: tuple[Path, GenieConfig], plain_answer: str
) -> None:
    folder, config = plain_dialog

    def with_scaling(scaling: dict[str, Any]) -> str:
        values = json.loads(config.to_json())
        values["dialog"]["engine"]["model"]["positional-encoding"]["rope-scaling"] = scaling
        return genie_lab.ask(folder, GenieConfig.model_validate(values))

    factors = [3.0] * 6
    told = {"short-factor": factors, "long-factor": factors, "factor": 1.0}
    longrope = {"rope-type": "longrope", "original-max-position-embeddings": 96, **told}
    linear = with_scaling({"rope-type": "linear", "factor": 3.0})
    assert with_scaling(longrope) == linear
    assert linear != plain_answer


def with_local_rotations(model: Path, folder: Path) -> Path:
    """Write a model whose odd layers take their rotations from inputs of their own."""
    changed = load_with_encodings(model)
    graph = changed.graph
    for given in [v for v in graph.inputs if v.name in {interface.COS, interface.SIN}]:
        name = interface.LOCAL_PREFIX + str(given.name)
        local = inherit(ir.Value(name=name, type=given.type, shape=given.shape), given)
        graph.inputs.append(local)
        for use in list(given.uses()):
            if int(str(use.node.name).split("_")[1]) % 2:
                use.node.replace_input_with(use.idx, local)
    return save_with_encodings(changed, folder / "model.onnx")


@pytest.mark.variant
def test_a_second_set_of_rotations_has_a_base_of_its_own(
    genie_lab: GenieLab, plain_answer: str, tmp_path: Path
) -> None:
    (tmp_path / "source").mkdir()
    model = with_local_rotations(genie_lab.export / "model.onnx", tmp_path / "source")
    config = genie_lab.compile(model, tmp_path)
    values = json.loads(config.to_json())
    block = values["dialog"]["engine"]["model"]
    first = block["positional-encoding"]

    def answer(theta: float) -> str:
        local = first | {"rope-theta": theta, "prefix": interface.LOCAL_PREFIX}
        block["positional-encoding"] = [first, local]
        return genie_lab.ask(tmp_path, GenieConfig.model_validate(values))

    assert answer(first["rope-theta"]) == plain_answer
    assert answer(50.0) != plain_answer
