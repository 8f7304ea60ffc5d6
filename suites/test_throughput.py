"""Throughput of prefill and decode over prompt and context lengths, in llama-bench's terms.

`ppN` is the prefill of N tokens, `tgN` the decode of N tokens after a short prompt, and
`tgN @ dD` the same after a prompt of D tokens. Each is a session in the results store.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest

from buildlib.container.manifest import read_metadata
from buildlib.errors import BuildError
from harness.pytest_plugin.measurements import MeasurementRecorder
from harness.pytest_plugin.options import read_settings
from harness.pytest_plugin.recordings import TestRecordings
from harness.runtimes.tokenizer import ContextLimit
from harness.workloads.bench import Bench
from harness.workloads.session import Session
from suites.answers import limit_of
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
    session: Session,
    recording: TestRecordings,
    record_measurement: MeasurementRecorder,
    suite_parameters: SuiteParameters,
    prompt_tokens: int,
) -> None:
    """Tokens a second of the prompt."""
    _skip_unless_it_fits(session, prompt_tokens, 1)
    bench = _bench(prompt_tokens, 1, suite_parameters)
    run = bench.run(session, recording(f"pp{prompt_tokens}")).output
    record_measurement.run(run, PREFILL_RATE, test=f"pp{prompt_tokens}")
    assert len(run.values(PREFILL_RATE)) == suite_parameters.repetitions


def test_decode(
    session: Session,
    recording: TestRecordings,
    record_measurement: MeasurementRecorder,
    suite_parameters: SuiteParameters,
    new_tokens: int,
) -> None:
    """Tokens a second after a short prompt."""
    _decode(session, recording, record_measurement, suite_parameters, _SHORT_PROMPT, new_tokens)


def test_decode_at_depth(
    session: Session,
    recording: TestRecordings,
    record_measurement: MeasurementRecorder,
    suite_parameters: SuiteParameters,
    depth: int,
) -> None:
    """Tokens a second in a context that holds something already."""
    new_tokens = min(suite_parameters.tg or _capacity(session.container.path).default.tg)
    _decode(session, recording, record_measurement, suite_parameters, depth, new_tokens)


def _decode(
    session: Session,
    recording: TestRecordings,
    record: MeasurementRecorder,
    suite_parameters: SuiteParameters,
    prompt_tokens: int,
    new_tokens: int,
) -> None:
    _skip_unless_it_fits(session, prompt_tokens, new_tokens)
    suffix = f" @ d{prompt_tokens}" if prompt_tokens > _SHORT_PROMPT else ""
    bench = _bench(prompt_tokens, new_tokens, suite_parameters)
    run = bench.run(session, recording(f"tg{new_tokens}{suffix}")).output
    if not run.values(DECODE_RATE):
        pytest.skip("the model ended its answer after one token: nothing was decoded")
    # A model may end its answer early; the name says what was decoded.
    count = int(min(run.values("generated_tokens")))
    record.run(run, DECODE_RATE, test=f"tg{count}{suffix}")
    assert len(run.values(DECODE_RATE)) == suite_parameters.repetitions


def _bench(prompt_tokens: int, new_tokens: int, suite_parameters: SuiteParameters) -> Bench:
    warmup = suite_parameters.warmup
    return Bench.of(
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        repetitions=suite_parameters.repetitions,
        warmup="auto" if warmup is None else warmup,
    )


def _skip_unless_it_fits(session: Session, prompt_tokens: int, new_tokens: int) -> None:
    if prompt_tokens < _SHORT_PROMPT:
        pytest.skip("a prompt has at least two tokens, bos being one")
    limit = limit_of(session)
    if not limit.allows(prompt_tokens, new_tokens):
        pytest.skip(
            f"{prompt_tokens} + {new_tokens} tokens do not fit: the container takes prompts of "
            f"{limit.longest_prompt} and {limit.context_length} tokens in all"
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
