"""Throughput of prefill and decode over prompt and context lengths, in llama-bench's terms.

`ppN` is the prefill of N tokens, `tgN` the decode of N tokens after a short prompt, and
`tgN @ dD` the same after a prompt of D tokens. Each is a session in the results store.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest

from buildlib.container.manifest import read_metadata
from buildlib.errors import BuildError
from harness.pytest_plugin.container_runner import ContainerRunner
from harness.pytest_plugin.measurements import MeasurementRecorder
from harness.pytest_plugin.options import read_settings
from harness.runtimes.context_limit import ContextLimit
from suites.parameters import (
    EMULATOR_LENGTHS,
    HARDWARE_LENGTHS,
    Lengths,
    SuiteParameters,
    choose_lengths,
    parameters,
)

_SHORT_PROMPT = 2
PREFILL_RATE, DECODE_RATE = "prefill_tokens_per_s", "decode_tokens_per_s"


@dataclass(frozen=True, slots=True)
class _Capacity:
    """The context of a container, and the lengths that it is measured with by default."""

    limit: ContextLimit
    default: Lengths

    def lengths(self, name: str, requested: SuiteParameters) -> tuple[int, ...]:
        context = self.limit.context_length
        prompt = min(self.limit.longest_prompt, context - 1)
        match name:
            case "prompt_tokens":
                return choose_lengths(requested.pp, self.default.pp, prompt)
            case "new_tokens":
                return choose_lengths(requested.tg, self.default.tg, context - _SHORT_PROMPT)
            case _:
                return choose_lengths(
                    requested.depth, self.default.depth, min(prompt, context // 2)
                )


_FALLBACK = _Capacity(ContextLimit(4096, 1), HARDWARE_LENGTHS)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each length that fits one of the containers."""
    requested = parameters(metafunc.config)
    folders = read_settings(metafunc.config).containers
    capacities = [_capacity(folder) for folder in folders] or [_FALLBACK]
    for name in ("prompt_tokens", "new_tokens", "depth"):
        if name in metafunc.fixturenames:
            lengths = {n for capacity in capacities for n in capacity.lengths(name, requested)}
            metafunc.parametrize(name, sorted(lengths))


def test_prefill(
    run_container: ContainerRunner,
    record_measurement: MeasurementRecorder,
    suite_parameters: SuiteParameters,
    prompt_tokens: int,
) -> None:
    """Tokens a second of the prompt."""
    _skip_unless_it_fits(run_container, prompt_tokens, 1)
    run = run_container.benchmark(
        prompt_tokens,
        1,
        repetitions=suite_parameters.repetitions,
        warmup=suite_parameters.warmup,
        label=f"pp{prompt_tokens}",
    )
    record_measurement.run(run, PREFILL_RATE, test=f"pp{prompt_tokens}")
    assert len(run.values(PREFILL_RATE)) == suite_parameters.repetitions


def test_decode(
    run_container: ContainerRunner,
    record_measurement: MeasurementRecorder,
    suite_parameters: SuiteParameters,
    new_tokens: int,
) -> None:
    """Tokens a second after a short prompt."""
    _decode(run_container, record_measurement, suite_parameters, _SHORT_PROMPT, new_tokens)


def test_decode_at_depth(
    run_container: ContainerRunner,
    record_measurement: MeasurementRecorder,
    suite_parameters: SuiteParameters,
    depth: int,
) -> None:
    """Tokens a second in a context that holds something already."""
    new_tokens = min(suite_parameters.tg or _capacity(run_container.container.path).default.tg)
    _decode(run_container, record_measurement, suite_parameters, depth, new_tokens)


def _decode(
    runner: ContainerRunner,
    record: MeasurementRecorder,
    suite_parameters: SuiteParameters,
    prompt_tokens: int,
    new_tokens: int,
) -> None:
    _skip_unless_it_fits(runner, prompt_tokens, new_tokens)
    suffix = f" @ d{prompt_tokens}" if prompt_tokens > _SHORT_PROMPT else ""
    run = runner.benchmark(
        prompt_tokens,
        new_tokens,
        repetitions=suite_parameters.repetitions,
        warmup=suite_parameters.warmup,
        label=f"tg{new_tokens}{suffix}",
    )
    if not run.values(DECODE_RATE):
        pytest.skip("the model ended its answer after one token: nothing was decoded")
    # A model may end its answer early; the name says what was decoded.
    done = int(min(run.values("generated_tokens")))
    record.run(run, DECODE_RATE, test=f"tg{done}{suffix}")
    assert len(run.values(DECODE_RATE)) == suite_parameters.repetitions


def _skip_unless_it_fits(runner: ContainerRunner, prompt_tokens: int, new_tokens: int) -> None:
    if prompt_tokens < _SHORT_PROMPT:
        pytest.skip("a prompt has at least two tokens, bos being one")
    if not ContextLimit.of(runner.container).allows(prompt_tokens, new_tokens):
        pytest.skip(
            f"{prompt_tokens} + {new_tokens} tokens do not fit: the container takes prompts of "
            f"{runner.longest_prompt} and {runner.context_length} tokens in all"
        )


def _capacity(folder: Path) -> _Capacity:
    """Return the capacity of a container; the test itself reports a folder that holds none."""
    try:
        metadata = read_metadata(folder)
    except BuildError:
        return _FALLBACK
    default = EMULATOR_LENGTHS if metadata.target.emulator else HARDWARE_LENGTHS
    graphs = metadata.graphs
    limit = ContextLimit(graphs.context_length, max(graphs.auto_regression_numbers))
    return _Capacity(limit, default)
