import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildlib.errors import BuildError
from buildlib.targets import Soc, Target, catalog, parse_target


@given(st.sampled_from(catalog()), st.booleans())
def test_a_target_survives_its_text(soc: Soc, emulator: bool) -> None:
    target = Target(soc, emulator=emulator)
    assert parse_target(str(target)) == target


@pytest.mark.parametrize(
    ("text", "target"),
    [
        *((text, "SM8750") for text in ("SM8750", "sm8750", " chipset:SM8750 ", "CHIPSET:sm8750")),
        ("chipset:SM8650:emulator", "SM8650:emulator"),
        *(
            (text, None)
            for text in ("SM8750:phone", "SM8750:", "chipset:", "", "SM8750:emulator:x")
        ),
    ],
)
def test_ways_to_write_a_target(text: str, target: str | None) -> None:
    if target is None:
        with pytest.raises(BuildError, match=r"^unknown (SoC|target) "):
            parse_target(text)
    else:
        assert str(parse_target(text)) == target
        assert parse_target(text).weight_sharing == (":" not in target)


def test_a_near_name_is_suggested() -> None:
    phone = parse_target("SM8750")
    assert (phone.soc.soc_model, phone.soc.dsp_arch, phone.emulator) == (69, "v79", False)
    for typed in ("SM875", "sm8570", "SM8570:emulator"):
        with pytest.raises(BuildError, match=r"did you mean SM8750\?") as caught:
            parse_target(typed)
        assert caught.value.exit_code == 2
    with pytest.raises(BuildError, match="write SM8750:emulator for its emulator"):
        parse_target("chipset:SM8750:emulatr")


@given(st.text().filter(lambda text: "SM" not in text.upper()))
def test_nonsense_is_one_typed_line(text: str) -> None:
    with pytest.raises(BuildError, match=r"^unknown SoC ['\"]x") as caught:
        parse_target("x" + text)
    assert "\n" not in str(caught.value)


def test_catalog_is_consistent() -> None:
    names = [soc.name for soc in catalog()]
    assert len(names) == len(set(names))
    assert {"SM8450", "SM8475", "SM8550", "SM8650", "SM8750", "SM8850"} <= set(names)
    for soc in catalog():
        assert 68 <= soc.htp_arch <= 81
        assert soc.soc_model > 0
        assert soc.vtcm_mb in {2, 4, 8}
