"""Distance of two models' next tokens, checked by hand."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from buildlib.numerics.divergence import Divergence, DivergenceSums, Logits, sqnr_db, token_losses


def measured(
    ours: Sequence[Logits], theirs: Sequence[Logits], tokens: Sequence[Sequence[int]]
) -> Divergence:
    sums = DivergenceSums()
    for each in zip(ours, theirs, tokens, strict=True):
        sums.add(*each)
    return sums.mean()


def logits(*rows: list[float]) -> np.ndarray:
    return np.log(np.array(rows, np.float64)).astype(np.float32)


def test_equal_models_are_not_apart() -> None:
    one = logits([0.5, 0.25, 0.25], [0.1, 0.8, 0.1])
    found = measured([one + 3], [one], [[0, 1]])  # logits are known up to a constant
    assert found.kl == pytest.approx(0.0, abs=1e-6)
    assert (found.top1, found.steps) == (1.0, 2)
    assert found.loss == pytest.approx(-(math.log(0.5) + math.log(0.8)) / 2, rel=1e-5)


def test_the_divergence_is_that_of_the_device_from_float() -> None:
    device, reference = logits([0.25, 0.75]), logits([0.5, 0.5])
    found = measured([device], [reference], [[1]])
    assert found.kl == pytest.approx(
        0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75), rel=1e-5
    )
    turned = measured([reference], [device], [[1]])
    assert turned.kl != pytest.approx(found.kl, rel=1e-3)
    assert found.loss == pytest.approx(-math.log(0.75), rel=1e-5)
    assert found.loss_float == pytest.approx(-math.log(0.5), rel=1e-5)


def test_losses_are_log_likelihoods() -> None:
    found = token_losses(logits([0.5, 0.25, 0.25], [0.1, 0.1, 0.8]), [1, 2])
    np.testing.assert_allclose(found, -np.log([0.25, 0.8]), rtol=1e-6)


def test_every_step_of_every_text_weighs_the_same() -> None:
    same, other = logits([0.9, 0.1]), logits([0.1, 0.9])
    three = np.concatenate([same, same, other])
    found = measured([same, three], [same, np.concatenate([same] * 3)], [[0], [0, 0, 0]])
    assert (found.top1, found.steps) == (0.75, 4)
    assert found.kl == pytest.approx((0.9 * math.log(9) + 0.1 * math.log(1 / 9)) / 4, rel=1e-5)


@pytest.mark.parametrize(
    ("device", "reference", "following"),
    [
        (logits([0.5, 0.5]), logits([0.5, 0.25, 0.25]), [0]),
        (logits([0.5, 0.5]), logits([0.5, 0.5], [0.5, 0.5]), [0]),
        (logits([0.5, 0.5]), logits([0.5, 0.5]), [0, 1]),
        (np.array([[np.nan, 0]], np.float32), logits([0.5, 0.5]), [0]),
        (np.array([[np.inf, 0]], np.float32), logits([0.5, 0.5]), [0]),
    ],
)
def test_what_cannot_be_compared_is_refused(
    device: np.ndarray, reference: np.ndarray, following: list[int]
) -> None:
    with pytest.raises(ValueError, match="logits"):
        measured([device], [reference], [following])


def test_the_error_of_the_loss_is_that_of_its_steps() -> None:
    rng = np.random.default_rng(2)
    device, reference = rng.normal(size=(2, 50, 7)).astype(np.float32)
    tokens = rng.integers(0, 7, 50).tolist()
    whole = measured([device], [reference], [tokens])
    alone = [
        measured([device[[step]]], [reference[[step]]], [[tokens[step]]]) for step in range(50)
    ]
    rises = np.array([one.loss - one.loss_float for one in alone])
    assert whole.error == pytest.approx(rises.std() / np.sqrt(50))
    assert [one.error for one in alone] == pytest.approx([0.0] * 50, abs=1e-6)


def test_sqnr_is_the_ratio_of_powers_in_db() -> None:
    signal = np.full(100, 2.0, np.float32)
    assert sqnr_db(signal, signal + np.float32(0.02)) == pytest.approx(40, abs=1e-3)
    assert sqnr_db(signal, signal) == math.inf
    assert sqnr_db(np.zeros(3, np.float32), np.ones(3, np.float32)) == -math.inf
    assert math.isnan(sqnr_db(signal, signal * np.float32(np.nan)))
