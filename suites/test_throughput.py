"""How fast are prefill and decode, over prompt and context lengths? In llama-bench's terms.

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
from suites.parameters import (
    ON_EMULATOR,
    ON_HARDWARE,
    Lengths,
    SuiteParameters,
    fitting,
    parameters,
)

_SHORT_PROMPT = 2
PREFILL_RATE, DECODE_RATE = "prefill_tokens_per_s", "decode_tokens_per_s"


@dataclass(frozen=True, slots=True)
class _Room:
    """What a container has room for, and which lengths it is measured with by default."""

    context: int = 4096
    ar: int = 1
    usual: Lengths = ON_HARDWARE

    @property
    def prompt(self) -> int:
        return min(self.context - self.ar + 1, self.context - 1)

    def lengths(self, name: str, asked: SuiteParameters) -> tuple[int, ...]:
        match name:
            case "prompt_tokens":
                return fitting(asked.pp, self.usual.pp, self.prompt)
            case "new_tokens":
                return fitting(asked.tg, self.usual.tg, self.context - _SHORT_PROMPT)
            case _:
                return fitting(asked.depth, self.usual.depth, min(self.prompt, self.context // 2))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each length that one of the containers has room for."""
    asked = parameters(metafunc.config)
    rooms = [_room(folder) for folder in read_settings(metafunc.config).containers] or [_Room()]
    for name in ("prompt_tokens", "new_tokens", "depth"):
        if name in metafunc.fixturenames:
            lengths = {length for room in rooms for length in room.lengths(name, asked)}
            metafunc.parametrize(name, sorted(lengths))


def test_prefill(
    run_container: ContainerRunner,
    record_measurement: MeasurementRecorder,
    suite_parameters: SuiteParameters,
    prompt_tokens: int,
) -> None:
    """Tokens a second of the prompt."""
    _skip_without_room(run_container, prompt_tokens, 1)
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
    new_tokens = min(suite_parameters.tg or _room(run_container.container.path).usual.tg)
    _decode(run_container, record_measurement, suite_parameters, depth, new_tokens)


def _decode(
    runner: ContainerRunner,
    record: MeasurementRecorder,
    asked: SuiteParameters,
    prompt_tokens: int,
    new_tokens: int,
) -> None:
    _skip_without_room(runner, prompt_tokens, new_tokens)
    suffix = f" @ d{prompt_tokens}" if prompt_tokens > _SHORT_PROMPT else ""
    run = runner.benchmark(
        prompt_tokens,
        new_tokens,
        repetitions=asked.repetitions,
        warmup=asked.warmup,
        label=f"tg{new_tokens}{suffix}",
    )
    if not run.values(DECODE_RATE):
        pytest.skip("the model ended its answer after one token: nothing was decoded")
    # A model may end its answer early; the name says what was decoded.
    done = int(min(run.values("generated_tokens")))
    record.run(run, DECODE_RATE, test=f"tg{done}{suffix}")
    assert len(run.values(DECODE_RATE)) == asked.repetitions


def _skip_without_room(runner: ContainerRunner, prompt_tokens: int, new_tokens: int) -> None:
    if prompt_tokens < _SHORT_PROMPT:
        pytest.skip("a prompt has at least two tokens, bos being one")
    if prompt_tokens > runner.longest_prompt or prompt_tokens + new_tokens > runner.context_length:
        pytest.skip(
            f"{prompt_tokens} + {new_tokens} tokens do not fit: the container takes prompts of "
            f"{runner.longest_prompt} and {runner.context_length} tokens in all"
        )


def _room(folder: Path) -> _Room:
    """That of a container; of what is none, the test itself says so."""
    try:
        metadata = read_metadata(folder)
    except BuildError:
        return _Room()
    usual = ON_EMULATOR if metadata.target.emulator else ON_HARDWARE
    graphs = metadata.graphs
    return _Room(graphs.context_length, max(graphs.auto_regression_numbers), usual)
