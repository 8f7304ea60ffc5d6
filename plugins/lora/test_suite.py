"""Do the reference model's adapters do on the device what they were trained for?

qnnfarm build suites/models/tiny_llama --lora suites/models/tiny_llama/lora/lora_config.yaml ...
"""

import pytest

from harness.pytest_plugin.recordings import TestRecordings
from harness.workloads.perplexity import score_text
from harness.workloads.session import Session
from suites.answers import ask, hold
from suites.conftest import fitting_container, suite_parameters
from suites.models.tiny_llama import lora
from suites.parameters import SuiteParameters

_MOST_WINDOWS = 2
_PROMPT, _NEW_TOKENS = "The judicial power", 12


@pytest.fixture
def adapters(session: Session) -> tuple[str, ...]:
    """Names of the container's adapters, if they are the reference model's."""
    block = session.container.genie_config.dialog.target_engine.model.lora
    names = () if block is None else tuple(adapter.name for adapter in block.adapters)
    if not names or not set(names) <= set(lora.NAMES):
        pytest.skip("the container has none of the reference model's adapters")
    return names


def test_each_adapter_improves_its_own_text(
    session: Session,
    recording: TestRecordings,
    adapters: tuple[str, ...],
    suite_parameters: SuiteParameters,
) -> None:
    """Perplexity of held-out text falls with the adapter of its kind, and not with another."""
    windows = min(_MOST_WINDOWS, suite_parameters.windows)
    for name in adapters:
        text = lora.heldout_text(name)

        def score(adapter: str | None, text: str = text) -> float:
            active = None if adapter is None else {adapter: 1.0}
            scored = score_text(session, text, recording(), windows=windows, lora=active)
            return scored.output.perplexity

        plain, adapted = score(None), score(name)
        assert adapted < plain, f"{name}: {plain:.3f} without it, {adapted:.3f} with it"
        for other in set(adapters) - {name}:
            assert score(other) > adapted, f"{other} is better than {name} on its own text"


def test_adapters_are_switched_at_run_time(session: Session, adapters: tuple[str, ...]) -> None:
    """In one dialog each adapter has its own text, and strength 0 gives back the model's."""
    plain = ask(session, _PROMPT, max_tokens=_NEW_TOKENS).text
    strengths = [(name, strength) for name in adapters for strength in (1.0, 0.0)]
    dialogs = [
        {"turns": [_PROMPT], "lora": {name: strength}}
        for name, strength in (*strengths, *strengths)
    ]
    result = hold(session, dialogs, _NEW_TOKENS)
    answers = [answer for (answer,) in result.answers]
    half = len(answers) // 2
    assert answers[:half] == answers[half:], "an adapter speaks otherwise the second time"
    adapted = answers[:half:2]
    assert set(answers[1::2]) == {plain}, "removal does not give back the model's text"
    assert len({plain, *adapted}) == 1 + len(adapters), "an adapter changes nothing"
