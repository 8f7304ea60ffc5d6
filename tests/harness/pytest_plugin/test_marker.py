"""`@pytest.mark.device`: what it says, and what is refused when tests are collected."""

from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.pool.requirement import Requirement
from harness.pytest_plugin.marker import MarkerError, check_marker, read_marker

_BAD = (
    ("socs='SM8750'", "does not know 'socs': it knows soc, hexagon"),
    ("'SM8750'", "takes keywords only, not 'SM8750'"),
    ("count=0", "count is 0, not a whole number from 1"),
    ("count=True", "count is True, not a whole number from 1"),
    ("tags=3", "tags is 3, not texts"),
    ("tags=['', 'a']", "tags is ['', 'a'], not texts"),
    ("type='phone'", "type is 'phone', not one of android, "),
    ("soc=8750", "soc is 8750, not a text"),
    ("free_bytes=-1", "free_bytes is -1, not a whole number of bytes"),
)


def _item(*keywords: dict[str, object]) -> pytest.Item:
    """Markers as pytest gives them: the closest first."""
    marks = [pytest.Mark("device", (), k, _ispytest=True) for k in keywords]
    item = SimpleNamespace(name="test_it", fixturenames=["devices"], iter_markers=lambda _: marks)
    return cast("pytest.Item", item)


def test_the_closest_marker_wins_and_tags_add_up() -> None:
    item = _item({"soc": "SM8750", "tags": "usb"}, {"soc": "SM8650", "count": 2, "tags": ["lab"]})
    tags = frozenset({"usb", "lab"})
    assert read_marker(item) == Requirement(soc="SM8750", count=2, tags=tags)


def test_no_marker_asks_for_any_device() -> None:
    assert read_marker(_item()) == Requirement()


@given(
    st.dictionaries(
        st.sampled_from(["soc", "hexagon", "type", "name", "tags", "free_bytes", "count", "x"]),
        st.one_of(
            st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9),
            st.lists(st.text(max_size=4), max_size=3), st.lists(st.lists(st.none()), max_size=2),
            st.sampled_from(["android", "virtual"]),
        ),
    )
)  # fmt: skip
def test_whatever_a_marker_holds_is_a_requirement_or_a_line(keywords: dict[str, object]) -> None:
    item = _item(keywords)
    try:
        requirement = read_marker(item)
    except MarkerError:
        with pytest.raises(
            pytest.Collector.CollectError, match=r"test_it: @pytest\.mark\."
        ) as line:
            check_marker(item)
        assert "\n" not in str(line.value)
    else:
        assert requirement.count == keywords.get("count", 1)
        assert all(requirement.tags)


@pytest.mark.parametrize(("arguments", "words"), _BAD, ids=[text for text, _ in _BAD])
def test_a_wrong_marker_is_an_error_of_its_file(
    pytester: pytest.Pytester, arguments: str, words: str
) -> None:
    pytester.makepyfile(
        test_wrong=f"import pytest\n@pytest.mark.device({arguments})\ndef test_a(devices): pass\n",
        test_right="def test_b(): pass\n",
    )
    result = pytester.runpytest_inprocess(
        "-p", "harness.pytest_plugin", "-p", "no:xdist", "--continue-on-collection-errors"
    )
    result.assert_outcomes(passed=1, errors=1)
    line = f"test_a: @pytest.mark.device {words}"
    assert line in result.stdout.str()
    assert "Traceback" not in result.stdout.str()


def test_several_devices_are_not_one(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "import pytest\n@pytest.mark.device(count=2)\ndef test_a(device): pass\n"
        "@pytest.mark.device(count=2)\nclass TestB:\n    def test_b(self, devices): pass\n"
    )
    result = pytester.runpytest_inprocess("-p", "harness.pytest_plugin", "-p", "no:xdist", "--co")
    assert "test_a: @pytest.mark.device(count=2) gives `devices`" in result.stdout.str()


def test_the_marker_is_registered(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_inprocess("-p", "harness.pytest_plugin", "--markers")
    assert "@pytest.mark.device(soc=None, hexagon=None" in result.stdout.str()
