"""Protocols of runtimes and of their capabilities, with requests and results.

A `Model` is what a runtime has opened on this host; `start` makes a `Runtime` of it on a device.
Its methods are its capabilities: `issubclass(GenieRuntime, Scores)` tells before there is a device,
and a workload names the Protocols that it needs. Their requests and results come first here.

Each method that runs something on a device raises `WrongUseError` for a request that the runtime
cannot meet, `DeploymentCorruptError` for inputs that arrived damaged, `RunnerError` for a program
that crashed, hung or refused, and `RuntimeOutputError` for an output that cannot be right.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, Self, runtime_checkable

from buildlib.container.manifest import SpeculationRecord
from harness.deploy.deploy import DEPLOY_TIMEOUT_S
from harness.deploy.deployment import DeployFile, Deployment, Shown
from harness.devices.base import DeviceProperties
from harness.devices.device import Device
from harness.errors import WrongUseError
from harness.results.perplexity import standard_error
from harness.results.records import ContainerInfo, Positions, TelemetrySeries
from harness.runtimes.dialog_settings import DialogSettings

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

ModelRole = Literal["target", "draft"]
"""Model of a container: the one that answers, or the one that drafts for it."""

LogLevel = Literal["error", "warn", "info", "verbose"]
"""Of the library's own log."""


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """Options of a runtime on a device.

    Attributes:
        timeout_s: for the deployment.
        runner_timeout_s: for one answer, window or text on the device; None for that of
            `DeployedRuntime.limit_s`.
        on_running: called now and then while a command runs, with its seconds so far and how far it
            is, in words, if it tells.
        telemetry_hz: samples a second while the device generates; None for no telemetry.
        shown: shows the deployment; None deploys silently.
        log_level: of the runtime's own log; None keeps its errors.
        trace: whether each answer comes with a trace of the runtime.
        push: files of the user's, by their names in the run folder; they replace the runtime's.
    """

    timeout_s: float = DEPLOY_TIMEOUT_S
    runner_timeout_s: float | None = None
    on_running: Callable[[float, str], None] | None = None
    telemetry_hz: float | None = None
    shown: Shown | None = None
    log_level: LogLevel | None = None
    trace: bool = False
    push: Mapping[str, DeployFile] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Framing:
    """Special tokens of prompts with complete token ids, as chat templates write them.

    The runtime puts none before them.

    Attributes:
        end_token: ends an answer, before any other end-of-sequence token, and stands after it in
            the context; None leaves that to the runtime.
    """

    end_token: int | None = None


@dataclass(frozen=True)
class GenerationRequest:
    """One query: a text, token ids, or embeddings, each taken as it is.

    Attributes:
        max_new_tokens: where generation stops if no end-of-sequence token comes first.
        fill_token_ids: fill the context before the query of `token_ids`, and are no part of its
            figures; empty for an empty context.
        embeddings: a file, that of bos first: `.npy`, or raw rows as the runtime takes them.
        framing: of complete `token_ids`; None where the runtime adds its own special tokens.
    """

    max_new_tokens: int
    prompt: str | None = None
    token_ids: tuple[int, ...] | None = None
    fill_token_ids: tuple[int, ...] = ()
    embeddings: Path | None = None
    settings: DialogSettings = field(default_factory=DialogSettings)
    framing: Framing | None = None

    def __post_init__(self) -> None:
        queries = (self.prompt, self.token_ids, self.embeddings)
        if sum(value is not None for value in queries) != 1:
            raise ValueError("a request has either a prompt, token ids or embeddings")
        if self.fill_token_ids and self.token_ids is None:
            raise ValueError("fill_token_ids come before token ids alone")


@dataclass(frozen=True, slots=True)
class EarlyEnd:
    """The end of an answer of fewer tokens than were asked for.

    Attributes:
        reason: why it ended, as far as the runner tells; None if nothing ended it.
    """

    tokens: int
    asked: int
    reason: str | None

    def __str__(self) -> str:
        reason = self.reason or (
            "it ended without an end-of-sequence token, a stop sequence or a full context"
        )
        return f"the answer has {self.tokens} of {self.asked} tokens: {reason}"


@dataclass(frozen=True)
class GenerationResult:
    """Result of one query, as the runtime itself measured it.

    Attributes:
        metrics: by key of `harness.results.metrics`, in that metric's unit.
        text: the answer, without the prompt.
        telemetry: samples of the device meanwhile, if asked for.
        profile: the runtime's own record of the query, as JSON; empty if it keeps none.
        trace: of the runtime, in the Trace Event Format, if asked for.
        token_ids: of the answer to token ids.
        streams: the answers of a dialog that gives several to one query.
        clocked: metrics that come from the clock of the runner's token callback, because the
            profile lacks them.
        answers: of the turns of a conversation; `text` is the last.
        early_end: why there are fewer tokens than were asked for; None if there are not.
        speculation: how texts of the dialog compare with plain decoding's, if it speculates.
        chat_difference: where the context of a chat differs from what its template gives for the
            whole conversation; None if nowhere.
        retries: how often the program ran again, because it lost the end of its output.
    """

    text: str
    metrics: Mapping[str, float]
    telemetry: tuple[TelemetrySeries, ...] = ()
    profile: str = ""
    trace: str = ""
    token_ids: tuple[int, ...] | None = None
    streams: tuple[str, ...] = ()
    clocked: frozenset[str] = frozenset()
    answers: tuple[str, ...] = ()
    early_end: EarlyEnd | None = None
    speculation: SpeculationRecord | None = None
    chat_difference: str | None = None
    retries: int = 0


Turn = str | tuple[int, ...]
"""A text, or token ids."""


@dataclass(frozen=True)
class Conversation:
    """Turns that see each other; the dialog is reset before it.

    Attributes:
        lora: adapters to apply before it; None leaves them as they are.
    """

    turns: tuple[Turn, ...]
    lora: Mapping[str, float] | None = None


@dataclass(frozen=True)
class ConversationRequest:
    """Conversations in one dialog of one process.

    Attributes:
        max_new_tokens: of each answer.
        rewind: each turn after the first replaces what follows its common beginning with the turn
            before, instead of going on after it.
        save: folder on this host to keep the state in after the last turn.
        restore: such a folder, to go on with its conversation.
        framing: see `GenerationRequest`; of turns of token ids.
    """

    conversations: tuple[Conversation, ...]
    max_new_tokens: int
    settings: DialogSettings = field(default_factory=DialogSettings)
    rewind: bool = False
    save: Path | None = None
    restore: Path | None = None
    framing: Framing | None = None


@dataclass(frozen=True)
class ConversationResult:
    """Answers of conversations.

    Attributes:
        answers: of each conversation, turn by turn.
        metrics: of the last turn; memory is that of the one process that held all.
        profile: the runtime's own record of all queries, as JSON.
        trace, speculation: see `GenerationResult`.
        early_end: of the last answer.
        token_ids: of the answers to token ids, where the runtime tells them.
    """

    answers: tuple[tuple[str, ...], ...]
    metrics: Mapping[str, float]
    profile: str = ""
    telemetry: tuple[TelemetrySeries, ...] = ()
    trace: str = ""
    speculation: SpeculationRecord | None = None
    early_end: EarlyEnd | None = None
    token_ids: tuple[tuple[tuple[int, ...] | None, ...], ...] = ()


@dataclass(frozen=True)
class SpeedRequest:
    """Numbers of tokens to process and to generate; which tokens they are is the runtime's choice.

    Attributes:
        depth_tokens: tokens in the context before the prompt; 0 for none.
        repetitions: number of results.
        warmup: repetitions before them, which are not among them; None is as the tool does.
    """

    prompt_tokens: int
    new_tokens: int
    depth_tokens: int = 0
    repetitions: int = 1
    warmup: int | None = None


@dataclass(frozen=True)
class Window:
    """A piece of a text that is scored by itself, from an empty context.

    Attributes:
        scored: the token ids that are predicted, without the bos before them.
        context: token ids between bos and those, which are predicted for no score.
    """

    text: str
    scored: tuple[int, ...]
    context: tuple[int, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        """All that follow bos, up to the last that is scored."""
        return (*self.context, *self.scored)


@dataclass(frozen=True)
class StepWindow:
    """A text that is decoded step by step: token ids without the bos before them.

    Attributes:
        following: tokens after the prompt; each step predicts one, and goes on with it.
        bos: whether bos stands before the prompt; the same in all windows of a call.
    """

    prompt: tuple[int, ...]
    following: tuple[int, ...]
    bos: bool = True


@dataclass(frozen=True)
class StepLogits:
    """Logits of decode steps.

    Attributes:
        windows: [steps, vocab] of each window.
        trace: see `GenerationResult`.
    """

    windows: "Sequence[npt.NDArray[np.float32]]"
    trace: str = ""


@dataclass(frozen=True)
class PerplexityResult:
    """A perplexity over windows.

    Attributes:
        windows: the perplexity of each window.
        tokens: number of scored tokens in all windows together.
        retries: how often windows were tried again, because the runtime hung or lost its output.
        positions: which positions of each window were scored.
        traces: of each window, in the Trace Event Format, if that was asked for.
    """

    perplexity: float
    windows: tuple[float, ...]
    tokens: int
    retries: int
    positions: Positions
    traces: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        perplexities: Sequence[float],
        windows: Sequence[Window],
        positions: Positions,
        *,
        retries: int = 0,
    ) -> Self:
        """Combine the perplexities of windows, each by the tokens that it scores."""
        counts = [len(window.scored) for window in windows]
        losses = (math.log(one) * n for one, n in zip(perplexities, counts, strict=True))
        combined = math.exp(sum(losses) / sum(counts))
        return cls(combined, tuple(perplexities), sum(counts), retries, positions)

    @property
    def error(self) -> float | None:
        """Standard error of the perplexity; None for a single window."""
        return standard_error([math.log(one) for one in self.windows])


class Runtime(Protocol):
    """A model on a device.

    Attributes:
        name: in `--runtime`, in plans, and in the results store.
    """

    name: ClassVar[str]

    def runner(self, capability: "Capability") -> str:
        """Name the program on the device that does this, such as `genie-t2t-run`."""
        ...

    def prepare(self) -> Deployment:
        """Put the model's files on the device; those that are there are not pushed again."""
        ...

    def versions(self) -> Mapping[str, str]:
        """Return the versions of the libraries on the device; deploy first if needed."""
        ...

    def sha256_of(self, file: str) -> str | None:
        """Return the hash of a deployed file, by its path, or its name, as the runner's has."""
        ...

    def read_log(self) -> str:
        """Read the end of the last process's log on the device; empty if there was none."""
        ...

    def clean(self) -> None:
        """Remove this run from the device; the content store stays."""
        ...


@runtime_checkable
class Generates(Protocol):
    """A runtime that answers prompts."""

    def generate(self, request: GenerationRequest) -> GenerationResult:
        """Run one query in a process of its own on the device."""
        ...

    def added_tokens(self, settings: DialogSettings, *, after_fill: bool = False) -> int:
        """Return how many tokens the runtime itself puts before a prompt, such as bos.

        Args:
            after_fill: whether `fill_token_ids` come before it.
        """
        ...


@runtime_checkable
class Converses(Protocol):
    """A runtime that holds conversations."""

    def converse(self, request: ConversationRequest) -> ConversationResult:
        """Hold conversations in one process on the device."""
        ...


@runtime_checkable
class TakesChats(Protocol):
    """A runtime that takes the token ids of a chat template as they are, with a `Framing`."""

    def end_token(self, settings: DialogSettings, framing: Framing) -> int:
        """Return the token that stands after an answer in the context."""
        ...


@runtime_checkable
class MeasuresSpeed(Protocol):
    """A runtime that measures its speed on tokens of its own choice, and tells no text."""

    def measure_speed(self, request: SpeedRequest) -> Iterator[GenerationResult]:
        """Yield repetitions as they are measured, each without a text."""
        ...


@runtime_checkable
class Scores(Protocol):
    """A runtime that scores texts."""

    def positions(self, role: ModelRole = "target") -> Positions:
        """Name the positions that it scores in each window."""
        ...

    def score(
        self,
        windows: Sequence[Window],
        role: ModelRole = "target",
        lora: Mapping[str, float] | None = None,
    ) -> PerplexityResult:
        """Score windows on the device."""
        ...


@runtime_checkable
class DecodesSteps(Protocol):
    """A runtime that tells the logits of decode steps."""

    def decode_steps(self, windows: Sequence[StepWindow]) -> StepLogits:
        """Decode texts step by step."""
        ...


Capability = type[Generates | Converses | TakesChats | MeasuresSpeed | Scores | DecodesSteps]
Need = Capability | tuple[Capability, ...]
"""A capability, or several of which one will do."""
_ABILITIES: Mapping[Capability, str] = MappingProxyType(
    {
        Generates: "answer prompts",
        Converses: "hold conversations",
        TakesChats: "take the prompts of a chat template",
        MeasuresSpeed: "measure its speed",
        Scores: "score texts",
        DecodesSteps: "tell the logits of decode steps",
    }
)
"""Capabilities in words that follow "it can"."""


def require(runtime: type[Runtime], needs: Iterable[Need]) -> None:
    """Refuse a runtime that lacks a capability."""
    for need in needs:
        if not issubclass(runtime, need):
            one_of = need if isinstance(need, tuple) else (need,)
            ability = " or ".join(_ABILITIES[capability] for capability in one_of)
            raise WrongUseError(
                f"the runtime {runtime.name} cannot {ability}, which this needs: name another one"
            )


class Model(Protocol):
    """A model that a runtime has opened on this host, and will run; it needs no device."""

    @property
    def runtime(self) -> type[Runtime]:
        """The runtime that runs it."""
        ...

    @property
    def path(self) -> Path:
        """The folder or file that it was opened from."""
        ...

    @property
    def info(self) -> ContainerInfo:
        """The model in the results store; without a target, it runs on any device."""
        ...

    @property
    def toolchain(self) -> Mapping[str, str]:
        """Versions of the tools that made it, by name; `toolchain` is the name of the first."""
        ...

    @property
    def tokenizer(self) -> Path:
        """Its `tokenizer.json`."""
        ...

    def check_dialog(
        self,
        settings: DialogSettings,
        prompt_tokens: int,
        new_tokens: int,
        *,
        depth_tokens: int = 0,
    ) -> None:
        """Refuse a dialog that the runtime cannot hold with it.

        Args:
            depth_tokens: in the context before the prompt.

        Raises:
            WrongUseError: the runtime lacks a setting.
            PromptTooLongError: depth, prompt and answer do not fit into the context.
        """
        ...

    def windows(
        self, text: str, most: int | None = None, role: ModelRole = "target"
    ) -> Sequence[Window]:
        """Cut a text into the windows that its runtime scores on a device, at most so many.

        Raises:
            WrongUseError: its runtime scores no texts, the text is shorter than one window, or
                there is no model in that role.
        """
        ...

    def check_fit(self, device: DeviceProperties) -> None:
        """Refuse a device that it is not for.

        Raises:
            RuntimeChoiceError: it is for another ABI or another processor.
        """
        ...

    def start(
        self, device: Device, properties: DeviceProperties, options: RuntimeOptions
    ) -> Runtime:
        """Make its runtime on a device; nothing is deployed yet."""
        ...
