"""SeqMSE: what it improves; the core's tests of techniques take it as well."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from buildlib.quantize.bitwidths import Bitwidths, WeightFormat
from buildlib.quantize.techniques.layerwise import LayerInputs
from buildlib.quantize.weight_grids import stored_steps
from plugins.techniques import seqmse
from tests.buildlib.quantize.test_techniques import (
    FORMATS,
    FOUR,
    WIDTH,
    Floats,
    float_model,
    layer,
    optimized_weight,
    to_nearest,
)


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_output_error_is_lower_than_with_rounding_to_the_nearest(fmt: WeightFormat) -> None:
    weights, inputs = layer()
    found = seqmse.solve(weights, fmt, inputs)

    def error(values: Floats) -> float:
        return float(np.square(inputs.seen @ values.T - inputs.real @ weights.T).mean())

    nearest = error(to_nearest(weights, fmt).values)
    assert error(found.values) < (0.9 if fmt.bits == 4 else 1.0) * nearest
    integers = found.values / stored_steps(found.steps, fmt, WIDTH)
    assert np.abs(integers - np.rint(integers)).max() < 1e-4
    assert np.abs(np.rint(integers)).max() <= 1 << (fmt.bits - 1)


def test_inputs_may_be_zero() -> None:
    weights, zeros = np.ones((3, 6), np.float32), np.zeros((8, 6), np.float32)
    found = seqmse.solve(weights, FOUR, LayerInputs(zeros, zeros.copy()))
    assert np.isfinite(found.values).all()


def test_its_arguments_reach_it(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", num_hidden_layers=1)
    model = float_model(folder, Bitwidths(param_bitwidth=4))
    weight = partial(optimized_weight, model, tmp_path, "0.self_attn.v_proj", "seqmse")
    assert np.abs(weight(num_candidates=2) - weight()).max() > 0
