"""Estimators of the ranges of activations."""

from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from buildlib.checkpoint.config import DecoderConfig
from buildlib.encodings.grid import activation_grid
from buildlib.encodings.model import Encodings, asymmetric_encoding
from buildlib.quantize.bitwidths import Bitwidths
from buildlib.quantize.calibration import Histogram, RangeEstimator, mse, percentile
from buildlib.quantize.options import RangeName
from buildlib.quantize.recipe import complete_encodings


def histogram(values: np.ndarray) -> Histogram:
    found = Histogram(float(values.min()), float(values.max()))
    for part in np.array_split(values, 7):
        found.add(part)
    return found


def with_outliers() -> np.ndarray:
    values = np.random.default_rng(0).normal(size=100_000)
    values[:3] = 40.0, 35.0, -60.0
    return values


def test_percentiles_leave_out_one_value_in_ten_thousand() -> None:
    values = with_outliers()
    low, high = percentile(histogram(values), 8)
    assert -6.0 < low < -3.0
    assert 3.0 < high < 6.0
    assert 0.99 * 2e-4 * len(values) > ((values < low) | (values > high)).sum()


@pytest.mark.parametrize("bits", [8, 16])
def test_mse_has_the_least_error(bits: int) -> None:
    values = np.append(with_outliers(), np.full(10, 20.0))

    def error(limits: tuple[float, float]) -> float:
        grid = activation_grid(asymmetric_encoding("x", *limits, bits))
        return float(np.square(grid.dequantize(grid.quantize(values)) - values).mean())

    seen = histogram(values)
    least, whole = error(mse(seen, bits)), error((seen.low, seen.high))
    assert least <= min(whole, error(percentile(seen, bits))) * 1.02
    assert bits == 16 or least < 0.9 * whole


@pytest.mark.parametrize("estimate", [percentile, mse])
@pytest.mark.parametrize("value", [0.0, 3.0])
def test_constant_values_have_a_range(estimate: RangeEstimator, value: float) -> None:
    low, high = estimate(histogram(np.full(5, value)), 8)
    assert low <= high
    assert asymmetric_encoding("x", low, high, 8).scale[0] > 0


def test_narrower_ranges_are_in_the_encodings(path: Path, config: DecoderConfig) -> None:
    windows = [np.random.default_rng(2).integers(0, 300, 48).tolist()]
    whole, *narrow_ones = (
        complete_encodings(path, Encodings(), config, windows, Bitwidths(8), ranges=name).by_name()
        for name in get_args(RangeName)
    )
    for narrow in narrow_ones:
        assert narrow.keys() == whole.keys()
        parts = [narrow[name].scale[0] / whole[name].scale[0] for name in whole]
        assert max(parts) <= 1.01
        assert min(parts) < 0.99
