"""A container loads, answers, and answers the same twice."""

from harness.pytest_plugin.container_runner import ContainerRunner
from harness.pytest_plugin.measurements import MeasurementRecorder
from harness.workloads.bench_prompt import BenchPrompt, cut_prompt

_PROMPT_TOKENS = 16
_NEW_TOKENS = 8


def _prompt(runner: ContainerRunner) -> BenchPrompt:
    most = min(_PROMPT_TOKENS, runner.longest_prompt, runner.context_length - _NEW_TOKENS) - 1
    return cut_prompt(runner.container.files["tokenizer.json"], most)


def test_load(run_container: ContainerRunner, record_measurement: MeasurementRecorder) -> None:
    """The container is deployed, loads, and gives a first token."""
    result = run_container(token_ids=_prompt(run_container).token_ids, max_new_tokens=2)
    assert result.metrics["ttft_s"] > 0
    for metric in ("init_s", "ttft_s", "peak_rss_bytes"):
        if metric in result.metrics:  # on a very busy device there may be no peak
            record_measurement(metric, result.metrics[metric])


def test_one_prompt(run_container: ContainerRunner) -> None:
    """A text is answered by a text, of no more tokens than were asked for."""
    prompt = _prompt(run_container)
    result = run_container(prompt.text, max_new_tokens=_NEW_TOKENS)
    assert result.text.strip(), f"no text after {prompt.text!r}"
    assert "\N{REPLACEMENT CHARACTER}" not in result.text.rstrip("\N{REPLACEMENT CHARACTER}")
    assert 1 <= result.metrics["generated_tokens"] <= _NEW_TOKENS


def test_determinism(run_container: ContainerRunner) -> None:
    """Sampling is greedy, so the same tokens are answered the same, in a fresh process each."""
    prompt = _prompt(run_container)
    texts = {
        run_container(token_ids=prompt.token_ids, max_new_tokens=_NEW_TOKENS).text for _ in range(2)
    }
    assert len(texts) == 1, f"one query, several answers: {sorted(texts)}"
