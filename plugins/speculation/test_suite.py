"""Speculative decoding against plain decoding: its text and its gain.

The container speculates; `--suite-param plain=DIR` is one of the same model that does not.
"""

from dataclasses import dataclass
from types import MappingProxyType

import pytest

from buildlib.container.container import GenAIContainer
from buildlib.container.genie_decoding import SPECULATIVE
from harness.pytest_plugin.measurements import MeasurementRecorder
from harness.runtimes.genie.runtime import GenieModel
from harness.runtimes.tokenizer import encode, load_tokenizer
from harness.workloads.session import Session
from suites.answers import ask, limit_of
from suites.conftest import fitting_container, suite_parameters
from suites.models import tiny_llama
from suites.parameters import SuiteParameters

_NEW_TOKENS = 24
_PROMPT_CHARACTERS = 60
_ACCEPTANCE = "token_acceptance_rate"
_DIFFERING = "differing_texts"
_LEAST = MappingProxyType({"spd": 1.2, "ssd-q1": 1.3, "eaglet": 2.0})
"""Tokens accepted per call of the target, at least; lookahead has no rate of its own."""


@dataclass(frozen=True)
class Answers:
    """Answers of both containers to one prompt."""

    plain: str
    speculated: str


@pytest.fixture
def plain_container(session: Session, suite_parameters: SuiteParameters) -> GenAIContainer:
    """The container of the same model that does not speculate."""
    kind = session.container.genie_config.dialog.type
    if kind not in SPECULATIVE:
        pytest.skip(f"a dialog of type {kind} does not speculate")
    if suite_parameters.plain is None:
        pytest.skip("nothing to compare it with: give --suite-param plain=DIR")
    return GenAIContainer.load(suite_parameters.plain)


@pytest.fixture
def prompts(session: Session, suite_parameters: SuiteParameters) -> tuple[str, ...]:
    """Beginnings of chapters that the reference model has not seen, as many as asked for."""
    tokenizer = load_tokenizer(session.model.tokenizer)
    text = tiny_llama.heldout_text()
    count = suite_parameters.speculation_prompts
    step = len(text) // count
    pieces = [text[i * step : i * step + _PROMPT_CHARACTERS] for i in range(count)]
    most = limit_of(session).longest_prompt - _NEW_TOKENS
    return tuple(
        piece.rsplit(" ", 1)[0] for piece in pieces if len(encode(tokenizer, piece)) < most
    )


def test_speculation_changes_no_text(
    session: Session,
    plain_container: GenAIContainer,
    prompts: tuple[str, ...],
    record_measurement: MeasurementRecorder,
) -> None:
    """Greedy text equals plain decoding's on held-out prompts, at the acceptance that is due."""
    kind = session.container.genie_config.dialog.type
    rates, pairs = [], []
    plain = GenieModel(plain_container)
    with Session(session.device, plain, properties=session.properties) as beside:
        for prompt in prompts:
            result = ask(session, prompt, max_tokens=_NEW_TOKENS)
            answer = ask(beside, prompt, max_tokens=_NEW_TOKENS)
            pairs.append(Answers(answer.text, result.text))
            if _ACCEPTANCE in result.metrics:
                rates.append(result.metrics[_ACCEPTANCE])
    over = f"{kind} over {len(pairs)} prompts"
    if rates:
        record_measurement(_ACCEPTANCE, sum(rates) / len(rates), test=over)
    differing = [pair for pair in pairs if pair.plain != pair.speculated]
    record_measurement(_DIFFERING, len(differing), test=over)
    assert not differing, f"{len(differing)} of {len(pairs)} texts differ, such as {differing[0]}"
    if kind in _LEAST:
        mean = sum(rates) / max(len(rates), 1)
        assert mean >= _LEAST[kind], f"{mean:.2f} tokens accepted per call, {_LEAST[kind]} are due"
