"""The benchmark of a container: one workload, repeated in one session or spread over several."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from buildlib.container.container import GenAIContainer
from harness.deploy.deployment import Deployment
from harness.deploy.pipeline import Shown
from harness.devices.base import Device
from harness.errors import WrongUseError
from harness.results.records import Condition, Run, new_run_id
from harness.results.store import ResultsStore
from harness.runtimes.base import Runtime
from harness.telemetry.sampler import DEFAULT_HZ
from harness.workloads.bench_prompt import BenchPrompt, cut_prompt
from harness.workloads.output_check import Expectation, ReferenceText
from harness.workloads.session import OnRepetition, Records, SessionPlan, run_session
from harness.workloads.target import DeviceSource, Target, target_on

Expect = Callable[[Target], tuple[Expectation, ...]]
"""What the output of a container on a device is checked against; may ask the device."""
Around = Callable[[Device, Deployment], AbstractContextManager[Sequence[Condition]]]
"""Puts a device into its measuring conditions for a block; gives what came of them."""
OnSession = Callable[[int, str, Target], None]
"""Called when a session begins, with its number from 0 and its label."""


@dataclass(frozen=True)
class BenchPlan:
    """How much to run, as in llama-bench: `-p` prompt tokens, `-n` new tokens, `-r` repetitions.

    Attributes:
        prompt_tokens: with the bos that Genie puts before them.
        warmup: repetitions that are kept, shown apart, and left out of every mean; None: as many
            as it takes until the values are steady.
        most_warmups: the most of them, where their number is detected.
    """

    prompt_tokens: int = 64
    new_tokens: int = 16
    repetitions: int = 3
    warmup: int | None = None
    most_warmups: int = 3

    def check(self) -> None:
        """Refuse numbers that make no sense.

        Raises:
            WrongUseError: names the number.
        """
        least = {"prompt_tokens": 2, "new_tokens": 1, "repetitions": 1, "most_warmups": 0}
        if self.warmup is not None:
            least["warmup"] = 0
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise WrongUseError(f"{name} must be at least {minimum}, not {getattr(self, name)}")

    def session(self, prompt: BenchPrompt) -> SessionPlan:
        """The same for one session."""
        return SessionPlan(
            prompt=prompt,
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.new_tokens,
            repetitions=self.repetitions,
            warmup=self.warmup,
            most_warmups=self.most_warmups,
        )

    def session_of(self, container: GenAIContainer) -> SessionPlan:
        """The same for one session, with a prompt for the container's tokenizer.

        Raises:
            WrongUseError: the tokenizer cannot be read, or makes no tokens of the passage.
        """
        return self.session(cut_prompt(container.files["tokenizer.json"], self.prompt_tokens - 1))


def run_bench(
    runtime: Runtime,
    plan: BenchPlan,
    prompt: BenchPrompt,
    records: Records,
    store: ResultsStore,
    on_repetition: OnRepetition | None = None,
) -> Run:
    """Run the plan in one session; gives the run as the store has it.

    Raises:
        HarnessError: what went wrong on the device; the run is in the store as failed, with that
            error.
    """
    return run_session(runtime, plan.session(prompt), records, store, on_repetition=on_repetition)


@dataclass(frozen=True, slots=True)
class Spread:
    """Where and how often a plan runs, and what is told meanwhile.

    Attributes:
        devices: gives the device of each session.
        expect: what outputs are checked against, besides those of the group's first session.
        around: puts a device into its measuring conditions; None: it is measured as it is.
        telemetry_hz: samples a second of each repetition; None: no telemetry.
        shown: shows deployments; None: they go on in silence.
    """

    devices: DeviceSource
    store: ResultsStore
    expect: Expect = lambda _target: ()
    around: Around | None = None
    telemetry_hz: float | None = DEFAULT_HZ
    shown: Shown | None = None
    on_session: OnSession = lambda _number, _label, _target: None
    on_repetition: OnRepetition | None = None

    def run(
        self,
        device: Device,
        container: GenAIContainer,
        plan: SessionPlan,
        *,
        group_id: str,
        session: int,
        label: str = "",
        first: Run | None = None,
    ) -> Run:
        """Run one session on a device that the caller holds.

        Args:
            first: the first session of the same container in the group, once there is one.

        Raises:
            HarnessError: it failed; if it had begun, it is in the store as failed.
        """
        with target_on(
            device, container, telemetry_hz=self.telemetry_hz, shown=self.shown
        ) as target:
            target.runtime.check_room(plan.prompt_tokens, plan.new_tokens)
            self.on_session(session, label, target)
            expectations = plan.expectations + self.expect(target)
            if first is not None and first.generated_text is not None:
                expectations += (ReferenceText(first.generated_text, first.check),)
            bound = replace(plan, expectations=expectations)
            if self.around is not None:
                bound = replace(bound, around=functools.partial(self.around, device))
            return run_session(
                target.runtime,
                bound,
                target.records(),
                self.store,
                group_id=group_id,
                session=session,
                label=label,
                on_repetition=self.on_repetition,
            )


def run_sessions(
    spread: Spread,
    container: GenAIContainer,
    plan: SessionPlan,
    *,
    sessions: int,
    label: str = "",
    group_id: str | None = None,
) -> tuple[Run, ...]:
    """Run a plan in several sessions of one group, each on the device that comes next.

    Raises:
        WrongUseError: no session is asked for.
        HarnessError: a session failed; those before it are in the store, and so is it if it had
            begun.
    """
    if sessions < 1:
        raise WrongUseError(f"sessions must be at least 1, not {sessions}")
    group = group_id or new_run_id()
    runs: list[Run] = []
    for number in range(sessions):
        with spread.devices(number) as device:
            run = spread.run(
                device,
                container,
                plan,
                group_id=group,
                session=number,
                label=label,
                first=runs[0] if runs else None,
            )
        runs.append(run)
    return tuple(runs)
