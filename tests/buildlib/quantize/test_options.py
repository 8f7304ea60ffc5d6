"""Recipes of quantization by name."""

from importlib.metadata import EntryPoints

import pytest

from buildlib import entry_points
from buildlib.builder.build_options import BuildOptions
from buildlib.errors import InvalidOptionError
from buildlib.quantize.bitwidths import Bitwidths
from buildlib.quantize.optimization import techniques
from buildlib.quantize.options import RECIPES, QuantizationOptions, check_arguments
from buildlib.quantize.techniques.arguments import TechniqueArguments

RECIPE = "quantization.recipe"
VENDORS = ("LPBQ_SeqMSE", "SpinQuant_AdaScale")


def test_a_technique_without_its_plugin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry_points, "installed", lambda _: EntryPoints(()))
    options = QuantizationOptions.model_validate({"techniques": ["gptq", "adascale"]})
    with pytest.raises(InvalidOptionError, match=r"no installed package has adascale"):
        check_arguments(options)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_can_be_asked_for(name: str) -> None:
    options = BuildOptions().with_options({RECIPE: name}).quantization
    assert set(options.weight_techniques) <= {
        "adascale",
        "seqmse",
        *techniques(TechniqueArguments(), ()),
    }
    bits = Bitwidths.from_options(options)
    assert f"w{bits.param_bitwidth}" in name or name in VENDORS


def test_options_of_ones_own_go_before_those_of_a_recipe() -> None:
    config = BuildOptions().with_options({RECIPE: "w4a16-channel", "quantization.techniques": []})
    config = config.with_options({"quantization.lpbq_block_size": 16})
    found = config.quantization
    assert (found.param_bitwidth, found.lpbq_block_size, found.weight_techniques) == (4, 16, ())
    other = config.with_options({RECIPE: "w8a16", "quantization.lpbq_block_size": None})
    assert other.quantization.param_bitwidth == 8


def test_four_bits_are_gptaq_unless_other_techniques_are_asked_for() -> None:
    assert QuantizationOptions(param_bitwidth=4).weight_techniques == ("gptaq",)
    assert QuantizationOptions(mixed_precision=("*up*=4",)).weight_techniques == ("gptaq",)
    assert QuantizationOptions(param_bitwidth=4, techniques=()).weight_techniques == ()
    assert QuantizationOptions().weight_techniques == ()


KWARGS = "quantization.technique_kwargs"


def test_arguments_of_techniques_are_options() -> None:
    config = BuildOptions().with_options({f"{KWARGS}.gptaq.damping": 0.05, RECIPE: "w4a16"})
    config = config.with_options({KWARGS: {"gptaq": {"act_order": False}}})
    arguments = config.quantization.technique_kwargs.gptaq
    assert (arguments.damping, arguments.block_size, arguments.act_order) == (0.05, 64, False)
    check_arguments(config.quantization)
    used = {key for key in config.used_options() if key.startswith(KWARGS)}
    assert used == {f"{KWARGS}.gptaq.{key}" for key in type(arguments).model_fields}
    wrong = config.with_options({f"{KWARGS}.gptq.damping": 0.05})
    with pytest.raises(InvalidOptionError, match="gptq is not applied; the techniques are gptaq"):
        check_arguments(wrong.quantization)


def test_blocks_of_lpbq_have_the_vendors_name_too() -> None:
    key = f"{KWARGS}.lpbq.block_size"
    found = BuildOptions().with_options({RECIPE: "LPBQ_SeqMSE", key: 32}).quantization
    assert found.lpbq_block_size == 32
    with pytest.raises(InvalidOptionError, match=r"lpbq_block_size is 16, and .* is 32"):
        BuildOptions().with_options({key: 32, "quantization.lpbq_block_size": 16})


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (RECIPE, "w4a61", r"there is no recipe 'w4a61'; there are w8a16, .*LPBQ_SeqMSE"),
        ("quantization.kv_bitwidth", 12, "must be 8 or 16"),
        (f"{KWARGS}.gptaq.dampng", 0.1, rf"did you mean {KWARGS}.gptaq.damping\?"),
        (f"{KWARGS}.gptqa.damping", 0.1, rf"did you mean {KWARGS}.gptaq.damping\?"),
        (f"{KWARGS}.gptaq.damping", 0, "must be greater than 0"),
        (f"{KWARGS}.gptaq.damping", "much", "must be a number, not 'much'"),
        (f"{KWARGS}.seqmse.num_candidates", 0, "must be at least 1"),
        (f"{KWARGS}.spinquant.seed", -1, "must be at least 0"),
    ],
)
def test_wrong_options_are_refused(key: str, value: object, said: str) -> None:
    with pytest.raises(InvalidOptionError, match=said):
        BuildOptions().with_options({key: value})
