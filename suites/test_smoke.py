"""A container loads, answers, and answers the same twice."""

from harness.pytest_plugin.measurements import MeasurementRecorder
from harness.workloads.bench_prompt import BenchPrompt, cut_prompt
from harness.workloads.session import Session
from suites.answers import ask, limit_of

_PROMPT_TOKENS = 16
_NEW_TOKENS = 8


def _prompt(session: Session) -> BenchPrompt:
    limit = limit_of(session)
    most = min(_PROMPT_TOKENS, limit.longest_prompt, limit.context_length - _NEW_TOKENS) - 1
    return cut_prompt(session.model.tokenizer, most)


def test_load(session: Session, record_measurement: MeasurementRecorder) -> None:
    """The container is deployed, loads, and gives a first token."""
    result = ask(session, tokens=_prompt(session).token_ids, max_tokens=2)
    assert result.metrics["ttft_s"] > 0
    for metric in ("init_s", "ttft_s", "peak_rss_bytes"):
        if metric in result.metrics:  # on a very busy device there may be no peak
            record_measurement(metric, result.metrics[metric])


def test_one_prompt(session: Session) -> None:
    """A text is answered by a text, of no more tokens than were asked for."""
    prompt = _prompt(session)
    result = ask(session, prompt.text, max_tokens=_NEW_TOKENS)
    assert result.text.strip(), f"no text after {prompt.text!r}"
    assert "\N{REPLACEMENT CHARACTER}" not in result.text.rstrip("\N{REPLACEMENT CHARACTER}")
    assert 1 <= result.metrics["generated_tokens"] <= _NEW_TOKENS


def test_determinism(session: Session) -> None:
    """Sampling is greedy, so the same tokens are answered the same, in a fresh process each."""
    prompt = _prompt(session)
    texts = {ask(session, tokens=prompt.token_ids, max_tokens=_NEW_TOKENS).text for _ in range(2)}
    assert len(texts) == 1, f"one query, several answers: {sorted(texts)}"
