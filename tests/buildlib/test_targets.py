import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildlib.errors import BuildError
from buildlib.targets import Soc, Target, catalog, find_soc, parse_target


@given(st.sampled_from(catalog()), st.booleans())
def test_a_target_survives_its_text(soc: Soc, emulator: bool) -> None:
    target = Target(soc, emulator=emulator)
    assert parse_target(str(target)) == target


@pytest.mark.parametrize("text", ["SM8750", "sm8750", " chipset:SM8750 ", "CHIPSET:sm8750"])
def test_ways_to_write_a_phone(text: str) -> None:
    target = parse_target(text)
    assert (target.soc.soc_model, target.soc.dsp_arch, target.emulator) == (69, "v79", False)
    assert target.weight_sharing


def test_emulator_target() -> None:
    target = parse_target("chipset:SM8650:emulator")
    assert str(target) == "SM8650:emulator"
    assert not target.weight_sharing


def test_near_match_is_suggested() -> None:
    with pytest.raises(BuildError, match="did you mean SM8750") as caught:
        find_soc("SM875")
    assert caught.value.exit_code == 2


@given(st.text().filter(lambda text: "SM" not in text.upper()))
def test_nonsense_is_one_typed_line(text: str) -> None:
    with pytest.raises(BuildError, match=r"^unknown SoC ['\"]x") as caught:
        parse_target("x" + text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["SM8750:phone", "SM8750:", "chipset:", "", "SM8750:emulator:x"])
def test_wrong_forms_are_refused(text: str) -> None:
    with pytest.raises(BuildError, match="unknown SoC"):
        parse_target(text)


def test_catalog_is_consistent() -> None:
    names = [soc.name for soc in catalog()]
    assert len(names) == len(set(names))
    assert {"SM8450", "SM8475", "SM8550", "SM8650", "SM8750", "SM8850"} <= set(names)
    for soc in catalog():
        assert 68 <= soc.htp_arch <= 81
        assert soc.soc_model > 0
        assert soc.vtcm_mb in {2, 4, 8}
