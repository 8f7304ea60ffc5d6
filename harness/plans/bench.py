"""The benchmark of a container on a device: a fixed prompt, warm-ups, repetitions, all kept."""

from collections.abc import Callable
from dataclasses import dataclass

from harness.errors import RuntimeOutputError, WrongUseError
from harness.plans.passage import BenchPrompt
from harness.runtimes.base import GenerationRequest, GenerationResult, Runtime
from harness.store.records import ContainerInfo, DeviceInfo, Provenance, Run, Workload
from harness.store.store import ResultsStore, RunRecorder

OnRepetition = Callable[[int, int, GenerationResult], None]


@dataclass(frozen=True)
class BenchPlan:
    """How much to run, as in llama-bench: `-p` prompt tokens, `-n` new tokens, `-r` repetitions.

    Attributes:
        prompt_tokens: with the bos that Genie puts before them.
        warmup: repetitions that are kept, shown apart, and left out of every mean.
    """

    prompt_tokens: int = 64
    new_tokens: int = 16
    repetitions: int = 3
    warmup: int = 1

    def check(self) -> None:
        """Refuse numbers that make no sense.

        Raises:
            WrongUseError: names the number.
        """
        least = {"prompt_tokens": 2, "new_tokens": 1, "repetitions": 1, "warmup": 0}
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise WrongUseError(f"{name} must be at least {minimum}, not {getattr(self, name)}")


def run_bench(
    runtime: Runtime,
    plan: BenchPlan,
    prompt: BenchPrompt,
    records: tuple[ContainerInfo, DeviceInfo, Provenance],
    store: ResultsStore,
    on_repetition: OnRepetition | None = None,
) -> Run:
    """Run the plan and keep every repetition as it comes; gives the run as the store has it.

    The runner is a process of its own each time, so that initialisation is measured with the rest.
    Sampling is greedy: a repetition that answers differently means that what was measured is not
    one thing, and the run fails.

    Raises:
        HarnessError: what went wrong on the device; the run is in the store as failed, with that
            error.
    """
    container, device, provenance = records
    run = Run(
        kind="bench",
        container=container,
        device=device,
        provenance=provenance,
        workload=Workload(
            runner=runtime.runner,
            prompt_tokens=plan.prompt_tokens,
            max_new_tokens=plan.new_tokens,
            repetitions=plan.repetitions,
            warmup=plan.warmup,
            sampler={"greedy": True},
            prompt=prompt.text,
        ),
    )
    request = GenerationRequest(plan.new_tokens, token_ids=prompt.token_ids)
    with store.recording(run) as recorder:
        _record_deployment(recorder, runtime)
        for number in range(plan.warmup + plan.repetitions):
            is_warmup = number < plan.warmup
            result = runtime.generate(request)
            _check_same_answer(recorder, result, device.serial)
            repetition = number if is_warmup else number - plan.warmup
            recorder.add_values(result.metrics, repetition=repetition, is_warmup=is_warmup)
            if on_repetition is not None:
                on_repetition(number, plan.warmup + plan.repetitions, result)
    return store.get_run(run.id)


def _record_deployment(recorder: RunRecorder, runtime: Runtime) -> None:
    deployment = runtime.prepare()
    recorder.add_library_versions(runtime.versions())
    recorder.add_values(
        {
            "push_s": deployment.elapsed_s,
            "push_bytes": deployment.pushed_bytes,
            "reused_bytes": deployment.reused_bytes,
        }
    )


def _check_same_answer(recorder: RunRecorder, result: GenerationResult, device: str) -> None:
    if recorder.generated_text not in {None, result.text}:
        reason = "the same greedy query gave two different texts"
        raise RuntimeOutputError(device, reason, result.text)
    recorder.generated_text = result.text
