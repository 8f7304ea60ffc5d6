from harness.pool.states import TRANSITIONS, Event, MemberState, after


def test_every_state_has_an_exit_and_leads_back_to_ready() -> None:
    assert set(TRANSITIONS) == set(MemberState)
    for state in MemberState:
        exits = {then for then in TRANSITIONS[state].values() if then is not state}
        assert exits, f"{state} has no exit"
    reaching = {MemberState.READY}
    while True:
        more = {
            state
            for state, ways in TRANSITIONS.items()
            if state not in reaching and reaching & set(ways.values())
        }
        if not more:
            break
        reaching |= more
    assert reaching == set(MemberState)


def test_every_state_can_be_reached_and_every_event_happens_somewhere() -> None:
    reached = {then for ways in TRANSITIONS.values() for then in ways.values()}
    assert reached == set(MemberState)
    assert {event for ways in TRANSITIONS.values() for event in ways} == set(Event)


def test_only_a_ready_device_is_granted_and_a_person_can_drain_any() -> None:
    for state in MemberState:
        granted = after(state, Event.GRANTED)
        assert (granted is MemberState.LEASED) == (state is MemberState.READY)
        if state is not MemberState.DRAINING:
            assert after(state, Event.DRAIN) is MemberState.DRAINING
    drained = TRANSITIONS[MemberState.DRAINING]
    assert {e for e, then in drained.items() if then is not MemberState.DRAINING} == {Event.UNDRAIN}


def test_quarantine_ends_only_with_a_probation_run_or_a_drain() -> None:
    assert TRANSITIONS[MemberState.QUARANTINED] == {
        Event.TRIED: MemberState.PROBATION,
        Event.DRAIN: MemberState.DRAINING,
    }
