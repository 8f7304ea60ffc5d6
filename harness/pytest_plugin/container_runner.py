"""`run_container`: one container on one leased device."""

import contextlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from harness.deploy.deployment import DeployFile, Deployment
from harness.errors import HarnessError
from harness.results.records import ContainerInfo, DeviceInfo, Provenance, Run, TelemetrySeries
from harness.runtimes.base import (
    Generates,
    GenerationRequest,
    GenerationResult,
    ModelRole,
    PerplexityResult,
)
from harness.runtimes.context_limit import ContextLimit
from harness.runtimes.dialog_settings import DialogSettings
from harness.telemetry.sampler import DEFAULT_HZ
from harness.workloads.base import Recording
from harness.workloads.bench import Bench
from harness.workloads.dialog import Dialog, DialogResult
from harness.workloads.embed import Embed, Embeddings
from harness.workloads.generate import Generate
from harness.workloads.perplexity import score_text
from harness.workloads.session import Session, SessionOptions
from harness.workloads.steps import (
    DEFAULT_STEP_WINDOWS,
    StepResult,
    compare_steps,
    cut_steps,
    float_steps,
)

if TYPE_CHECKING:
    from buildlib.container.container import GenAIContainer
    from harness.devices.base import Device, DeviceProperties
    from harness.results.store import ResultsStore
    from harness.runtimes.base import Model

OpenStore = Callable[[], "ResultsStore"]


class ContainerRunner:
    """Runs a container on a device, for one test.

    Nothing is deployed before the first run, and `close` leaves nothing of the test on the device.

    Attributes:
        runtime: what runs the container.
        target: container, device and runtime together.
        deployment: what lies on the device, once something does.
        telemetry: what was sampled during the last query.
        session, case, label: as below.

    Args:
        run_uid: the same in all processes of one run of pytest, and in no other run.
        session: which of the `--repeat` sessions.
        case: the test with its parameters, the same in all sessions.
        label: of its runs in the store.
        on_run: told of each run that the store has got.
        push: see `RuntimeOptions`.

    Raises:
        RuntimeChoiceError: the container is not for this device.
    """

    def __init__(
        self,
        device: "Device",
        properties: "DeviceProperties",
        model: "Model",
        open_store: OpenStore,
        *,
        run_uid: str,
        session: int = 0,
        case: str = "",
        label: str = "",
        on_run: Callable[[Run], None] = lambda _run: None,
        timeout_s: float = 300.0,
        push: Mapping[str, DeployFile] = MappingProxyType({}),
    ) -> None:
        options = SessionOptions(
            runner_timeout_s=timeout_s,
            telemetry_hz=DEFAULT_HZ,
            on_repetition=self._keep_telemetry,
            push=push,
        )
        self.target = Session(device, model, options, properties=properties)
        self.runtime = self.target.runtime
        self.telemetry: tuple[TelemetrySeries, ...] = ()
        self.deployment: Deployment | None = None
        self._open_store = open_store
        self.session = session
        self.case = case
        self.label = label
        self._on_run = on_run
        self._run_uid = run_uid
        self._benchmarks = 0

    def __call__(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        max_new_tokens: int = 16,
        embeddings: Path | None = None,
        settings: DialogSettings | None = None,
    ) -> GenerationResult:
        """Run one query in a new process on the device, and sample the device meanwhile.

        Args:
            embeddings: a file of embeddings as the prompt.
            settings: of the dialog; None: greedy.

        Raises:
            ValueError: not one of a prompt, token ids and embeddings.
            PromptTooLongError: it does not fit into the context.
            DeviceError: the device or the runner failed.
        """
        ids = None if token_ids is None else tuple(token_ids)
        request = GenerationRequest(
            max_new_tokens,
            prompt,
            ids,
            embeddings=embeddings,
            settings=settings or DialogSettings(),
        )
        self._deploy()
        result = self.target.require(Generates).generate(request)
        self.telemetry = result.telemetry
        return result

    @property
    def device(self) -> "Device":
        """The device."""
        return self.target.device

    @property
    def container(self) -> "GenAIContainer":
        """The container."""
        return self.target.container

    @property
    def runner_sha256(self) -> str | None:
        """Hash of the program that ran; None if nothing was deployed."""
        if self.deployment is None:
            return None
        files = {file.name: file.sha256 for file in self.deployment.files}
        return files.get(self.runtime.runner(Generates))

    @property
    def emulated(self) -> bool:
        """True if the device is an emulator, whose speed says nothing about hardware."""
        return self.target.device_info.emulator

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and answer together."""
        return ContextLimit.of(self.container).context_length

    @property
    def longest_prompt(self) -> int:
        """Most tokens of a prompt, with bos."""
        return ContextLimit.of(self.container).longest_prompt

    def benchmark(
        self,
        prompt_tokens: int,
        new_tokens: int,
        *,
        repetitions: int = 5,
        warmup: int | None = None,
        label: str = "",
    ) -> Run:
        """Measure one workload as a session, and store every repetition with its telemetry.

        Args:
            prompt_tokens: of the prompt, bos included.
            warmup: repetitions before the measured ones; None: until they are steady.
            label: of the run in the store; by default the test's name.

        Raises:
            HarnessError: what went wrong; the run is in the store as failed.
        """
        bench = Bench.of(
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            repetitions=repetitions,
            warmup="auto" if warmup is None else warmup,
        )
        bench.check(self.target.model)
        self._deploy()
        self._benchmarks += 1
        workload = (label or self.label, prompt_tokens, new_tokens, self._benchmarks)
        with self._open_store() as store:
            recording = Recording(
                lambda: store, self.group(*workload), self.session, label or self.label
            )
            run = bench.run(self.target, recording).output
        self._on_run(run)
        return run

    def perplexity(
        self,
        text: str,
        *,
        max_windows: int | None = None,
        references: Mapping[str, float] | None = None,
        role: ModelRole = "target",
        lora: Mapping[str, float] | None = None,
    ) -> PerplexityResult:
        """Score a text, and store the result.

        Args:
            lora: the adapter to apply, and its strength.
            role: which model of a container that drafts.
            references: by metric, such as `perplexity_float`: what the host computed over the
                same positions.

        Raises:
            HarnessError: what went wrong; the run is in the store as failed.
        """
        self._deploy()
        with self._open_store() as store:
            return score_text(
                self.target,
                text,
                Recording(lambda: store),
                windows=max_windows,
                references=references,
                role=role,
                lora=lora,
            ).output

    def decode_steps(
        self, text: str, reference: Path, *, max_windows: int | None = None
    ) -> StepResult:
        """Compare decode steps with a checkpoint in float, and store the result.

        Raises:
            HarnessError: what went wrong; the run is in the store as failed.
        """
        self._deploy()
        windows = self.target.model.windows(text, max_windows or DEFAULT_STEP_WINDOWS)
        steps = cut_steps(windows)
        expected = float_steps(reference, self.target.container_info, steps)
        with self._open_store() as store:
            recording = Recording(lambda: store)
            return compare_steps(self.target, text, steps, expected, recording).output

    def embed(
        self, texts: Sequence[str], *, reference: Path | None = None, per_token: bool = False
    ) -> Embeddings:
        """Embed texts, and store times and cosines; see `harness.workloads.embed`.

        Args:
            reference: folder or file of the ONNX that the host runs in float.

        Raises:
            HarnessError: what went wrong; the run is in the store as failed.
        """
        workload = Embed.of(
            texts=tuple(texts),
            reference=None if reference is None else str(reference),
            per_token=per_token,
        )
        self._deploy()
        with self._open_store() as store:
            return workload.run(self.target, Recording(lambda: store)).output

    def dialogs(
        self,
        dialogs: Sequence[Sequence[str] | Mapping[str, object]],
        *,
        max_new_tokens: int = 16,
        settings: DialogSettings | None = None,
    ) -> DialogResult:
        """Hold conversations of several turns; see `harness.workloads.dialog`.

        Args:
            dialogs: turns of each, or `{"turns": ..., "lora": {NAME: STRENGTH}}`.
            settings: of the dialog; None: greedy.
        """
        workload = Dialog.of(
            dialogs=tuple(
                dict(turns) if isinstance(turns, Mapping) else tuple(turns) for turns in dialogs
            ),
            max_tokens=max_new_tokens,
            **(settings or DialogSettings()).model_dump(exclude_none=True),
        )
        workload.check(self.target.model)
        return workload.run(self.target).output

    def converse(
        self,
        *turns: str,
        max_new_tokens: int = 16,
        chat: bool = False,
        system: str | None = None,
        rewind: bool = False,
        save: Path | None = None,
        restore: Path | None = None,
        settings: DialogSettings | None = None,
    ) -> tuple[str, ...]:
        """Hold one conversation, and return its answers.

        Args:
            chat: turns are messages, and the container's chat template makes the prompts.
            system: the system message of a chat.
            rewind: turns replace what follows their common beginning with the turn before.
            save: a new folder for the state after the last turn.
            restore: such a folder, whose dialog goes on.
        """
        workload = Generate.of(
            prompt=turns,
            max_tokens=max_new_tokens,
            chat=chat or None,
            system=system,
            rewind=rewind or None,
            save=None if save is None else str(save),
            restore=None if restore is None else str(restore),
            **(settings or DialogSettings()).model_dump(exclude_none=True),
        )
        return workload.run(self.target).output.answers

    def records(self) -> tuple[ContainerInfo, DeviceInfo, Provenance]:
        """Return the records of container, device and provenance for the results store."""
        return self.target.records()

    def group(self, *workload: object) -> str:
        """Return the id that all sessions of a workload of this test share on one kind of device.

        It is another in another run of pytest.
        """
        device = self.target.device_info
        sha256 = self.target.container_info.sha256
        cell = (self._run_uid, sha256, self.runtime.name, device.soc, device.emulator, self.case)
        text = "\n".join(map(str, (*cell, *workload)))
        return uuid.uuid5(uuid.NAMESPACE_URL, text).hex

    def close(self) -> None:
        """Remove this test's run folder; the content store on the device stays."""
        self.deployment = None
        with contextlib.suppress(HarnessError):
            self.target.close()

    def _deploy(self) -> Deployment:
        self.deployment = self.runtime.prepare()
        return self.deployment

    def _keep_telemetry(self, _number: int, _most: int, result: GenerationResult) -> None:
        self.telemetry = result.telemetry
