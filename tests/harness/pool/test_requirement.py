"""Members that meet a requirement, and what those lack that do not."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.devices.spec import DeviceSpec
from harness.errors import RequirementError
from harness.pool.requirement import MemberStatus, Requirement, candidates
from harness.pool.states import MemberState

PHONE = MemberStatus(
    "one", DeviceSpec("android", "1"), frozenset({"all", "tag0"}), MemberState.READY, "", 0.0,
    soc="SM8750", hexagon="v79", free_bytes=1 << 30,
)  # fmt: skip
OTHER = replace(PHONE, name="two", tags=frozenset({"all"}))

_tags = st.frozensets(st.sampled_from(["a", "b"]))
_members = st.lists(
    st.builds(
        MemberStatus,
        st.sampled_from(["one", "two"]),
        st.sampled_from([DeviceSpec("android", "1"), DeviceSpec("local")]),
        _tags,
        st.just(MemberState.READY),
        st.just(""),
        st.just(0.0),
        soc=st.sampled_from(["", "SM1", "SM2"]),
        hexagon=st.sampled_from(["", "v1", "v2"]),
        free_bytes=st.sampled_from([None, 0, 9, 10]),
    ),
    max_size=5,
)
_requirements = st.builds(
    Requirement,
    soc=st.sampled_from([None, None, None, "SM1"]),
    hexagon=st.sampled_from([None, None, None, "v1"]),
    type=st.sampled_from([None, None, None, "local"]),
    name=st.sampled_from([None, None, None, "two"]),
    tags=st.sampled_from([frozenset[str](), frozenset("a")]),
    min_free_bytes=st.sampled_from([0, 10]),
    count=st.integers(1, 3),
)


def meets(member: MemberStatus, wanted: Requirement) -> bool:
    """What a device that never answered has is not known, so it may have all that is wanted."""
    unknown = member.soc == member.hexagon == "" and member.free_bytes is None
    return (
        wanted.name in {None, member.name}
        and wanted.type in {None, member.spec.type}
        and (unknown or wanted.soc in {None, member.soc})
        and (unknown or wanted.hexagon in {None, member.hexagon})
        and wanted.tags <= member.tags
        and (member.free_bytes is None or member.free_bytes >= wanted.min_free_bytes)
    )


@settings(max_examples=300)
@given(_requirements, _members)
def test_candidates_meet_all_and_the_plainest_come_first(
    wanted: Requirement, members: list[MemberStatus]
) -> None:
    fits = [member for member in members if meets(member, wanted)]
    if len(fits) < wanted.count:
        with pytest.raises(RequirementError, match=r"^[^\n]+$"):
            candidates(wanted, members)
    else:
        assert candidates(wanted, members) == sorted(fits, key=lambda member: len(member.tags))


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (Requirement(soc="SM8650"), "none has the SoC SM8650 (one: SM8750, two: SM8750)"),
        (Requirement(hexagon="v75"), "none has the Hexagon architecture v75 (one: v79, two: v79)"),
        (Requirement(type="local"), "none has the type local (one: android, two: android)"),
        (Requirement(name="nobody"), "none has the name nobody (one: one, two: two)"),
        (Requirement(tags=frozenset({"gpu"})), "none has the tag gpu (one: all tag0, two: all)"),
        (Requirement(min_free_bytes=1 << 31), "free bytes (one: 1,073,741,824, two: 1,07"),
        (Requirement(count=3), "3 with a count of 3 are wanted, there are 2 (one, two)"),
        (Requirement(tags=frozenset({"tag0"}), count=2), "the tag tag0 are wanted, there are 1"),
    ],
)
def test_what_cannot_be_met_is_refused_with_what_there_is(wanted: Requirement, said: str) -> None:
    with pytest.raises(RequirementError) as caught:
        candidates(wanted, [PHONE, OTHER])
    assert said in str(caught.value)
    with pytest.raises(RequirementError, match="the pool has no devices"):
        candidates(wanted, [])


def test_many_devices_are_cut_short() -> None:
    many = [replace(PHONE, name=f"d{number}") for number in range(9)]
    with pytest.raises(RequirementError, match=r"d7: SM8750 and 1 more\)"):
        candidates(Requirement(soc="SM1"), many)


def test_a_requirement_in_words() -> None:
    wanted = Requirement(
        soc="SM8750", hexagon="v79", type="android", name="one", tags=frozenset("ba"),
        min_free_bytes=5, count=2,
    )  # fmt: skip
    words = "soc=SM8750 hexagon=v79 type=android name=one tag=a tag=b free>=5 count=2"
    assert (str(wanted), str(Requirement())) == (words, "any device")
    with pytest.raises(ValueError, match="at least one device"):
        Requirement(count=0)
