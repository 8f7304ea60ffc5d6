"""Recipes of quantization by name."""

import pytest

from buildlib.errors import InvalidOptionError
from buildlib.pipeline.options import ConversionConfig
from buildlib.quantize.bitwidths import Bitwidths
from buildlib.quantize.optimization import techniques
from buildlib.quantize.options import RECIPES, QuantizationOptions

RECIPE = "quantization.recipe"


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_can_be_asked_for(name: str) -> None:
    options = ConversionConfig().with_options({RECIPE: name}).quantization
    assert set(options.weight_techniques) <= techniques().keys()
    bits = Bitwidths.from_options(options)
    assert f"w{bits.param_bitwidth}" in name or bits.lpbq_block_size == 64


def test_options_of_ones_own_go_before_those_of_a_recipe() -> None:
    config = ConversionConfig().with_options({RECIPE: "w4a16-lpbq", "quantization.techniques": []})
    config = config.with_options({"quantization.lpbq_block_size": 32})
    found = config.quantization
    assert (found.param_bitwidth, found.lpbq_block_size, found.weight_techniques) == (4, 32, ())
    other = config.with_options({RECIPE: "w8a16", "quantization.lpbq_block_size": None})
    assert other.quantization.param_bitwidth == 8


def test_four_bits_are_gptaq_unless_other_techniques_are_asked_for() -> None:
    assert QuantizationOptions(param_bitwidth=4).weight_techniques == ("gptaq",)
    assert QuantizationOptions(mixed_precision=("*up*=4",)).weight_techniques == ("gptaq",)
    assert QuantizationOptions(param_bitwidth=4, techniques=()).weight_techniques == ()
    assert QuantizationOptions().weight_techniques == ()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("SpinQuant_AdaScale", r"AdaScale learns its scales by gradient .*w4a16-spinquant has"),
        ("w4a61", r"there is no recipe 'w4a61'; there are w8a16, .*LPBQ_SeqMSE"),
    ],
)
def test_recipes_that_cannot_be_done_are_refused_by_name(name: str, said: str) -> None:
    with pytest.raises(InvalidOptionError, match=said):
        ConversionConfig().with_options({RECIPE: name})
