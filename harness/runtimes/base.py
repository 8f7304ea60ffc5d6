"""Protocol of a runtime, its queries and its answers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from buildlib.container.genie_config import GenieConfig
from buildlib.container.manifest import SpeculationRecord
from harness.deploy.deployment import Deployment
from harness.results.perplexity import standard_error
from harness.results.records import Positions, Runner, TelemetrySeries

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

ModelRole = Literal["target", "draft"]
"""Model of a container: the one that answers, or the one that drafts for it."""

LogLevel = Literal["error", "warn", "info", "verbose"]
"""Of Genie's own log, and of QNN's below it."""


@dataclass(frozen=True)
class GenerationRequest:
    """One query: a text, token ids, or embeddings, each taken as it is.

    Attributes:
        max_new_tokens: where generation stops if no end-of-sequence token comes first.
        fill_token_ids: fill the context before the query of `token_ids`, and are no part of its
            figures; empty for an empty context.
        embeddings: rows as the container's configuration has them, that of bos in front.
        config: Genie's configuration of the dialog; None for the container's own.
        lora: adapters to apply, with their strengths.
    """

    max_new_tokens: int
    prompt: str | None = None
    token_ids: tuple[int, ...] | None = None
    fill_token_ids: tuple[int, ...] = ()
    embeddings: bytes | None = None
    config: GenieConfig | None = None
    lora: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = (self.prompt, self.token_ids, self.embeddings)
        if sum(value is not None for value in given) != 1:
            raise ValueError("a request has either a prompt, token ids or embeddings")
        if self.fill_token_ids and self.token_ids is None:
            raise ValueError("only a request of token ids comes after others")


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
            "Genie ended it without an end-of-sequence token, a stop sequence or a full context"
        )
        return f"the answer has {self.tokens} of {self.asked} tokens: {reason}"


@dataclass(frozen=True)
class GenerationResult:
    """Result of one query, as the runtime itself measured it.

    Attributes:
        metrics: by key of `harness.results.metrics`, in that metric's unit.
        text: what was generated, without the prompt.
        telemetry: what was sampled on the device meanwhile, if that was asked for.
        profile: the runtime's own record of the query, as JSON; empty if it keeps none.
        trace: what it did when, in the Trace Event Format, if that was asked for.
        token_ids: what was generated, if token ids were asked.
        streams: the answers of a dialog that gives several to one query.
        clocked: metrics that come from the clock of the runner's token callback, because the
            profile lacks them.
        answers: of the turns of a conversation; `text` is the last.
        early_end: why there are fewer tokens than were asked for; None if there are not.
        speculation: how texts of the dialog compare with plain decoding's, if it speculates.
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
        config: see `GenerationRequest`.
        rewind: each turn after the first replaces what follows its common beginning with the turn
            before, instead of going on after it.
        save: folder on this host to keep the state in after the last turn.
        restore: such a folder, whose conversation goes on.
    """

    conversations: tuple[Conversation, ...]
    max_new_tokens: int
    config: GenieConfig | None = None
    rewind: bool = False
    save: Path | None = None
    restore: Path | None = None


@dataclass(frozen=True)
class ConversationResult:
    """Answers of conversations.

    Attributes:
        answers: of each conversation, turn by turn.
        metrics: of the last turn.
        profile: the runtime's own record of all queries, as JSON.
        trace, speculation: see `GenerationResult`.
    """

    answers: tuple[tuple[str, ...], ...]
    metrics: Mapping[str, float]
    profile: str = ""
    telemetry: tuple[TelemetrySeries, ...] = ()
    trace: str = ""
    speculation: SpeculationRecord | None = None


@dataclass(frozen=True)
class Window:
    """A piece of a text that is scored by itself, from an empty context.

    Attributes:
        scored: the token ids that are predicted, without the bos before them.
    """

    text: str
    scored: tuple[int, ...]


@dataclass(frozen=True)
class StepWindow:
    """A text that is decoded step by step: token ids without the bos before them.

    Attributes:
        following: tokens after the prompt; each step predicts one, and goes on with it.
    """

    prompt: tuple[int, ...]
    following: tuple[int, ...]


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
        retries: windows that had to be tried again because the runtime hung.
        positions: which positions of each window were scored.
        traces: of each window, in the Trace Event Format, if that was asked for.
    """

    perplexity: float
    windows: tuple[float, ...]
    tokens: int
    retries: int
    positions: Positions
    traces: tuple[str, ...] = ()

    @property
    def error(self) -> float | None:
        """Standard error of the perplexity; None for a single window."""
        return standard_error([math.log(one) for one in self.windows])


@dataclass(frozen=True)
class TextVectors:
    """Vectors of one text.

    Attributes:
        shape: `[1, embed]`, or `[tokens, embed]` of single tokens.
        data: float32 values row by row, little-endian.
        seconds: that it took.
    """

    shape: tuple[int, ...]
    data: bytes
    seconds: float

    def array(self) -> "npt.NDArray[np.float32]":
        """Return the values."""
        import numpy as np

        return np.frombuffer(self.data, "<f4").reshape(self.shape).astype(np.float32)


@dataclass(frozen=True)
class EmbeddingResult:
    """Embeddings of texts, in their order.

    Attributes:
        metrics: of the whole, by key of `harness.results.metrics`.
        profile: the runtime's own record, as JSON.
        trace: see `GenerationResult`.
    """

    vectors: tuple[TextVectors, ...]
    metrics: Mapping[str, float]
    profile: str = ""
    trace: str = ""


class Runtime(Protocol):
    """Runs one container on one device."""

    @property
    def runner(self) -> Runner:
        """The program that answers queries on the device."""
        ...

    @property
    def embedding_runner(self) -> Runner:
        """The program that embeds texts on the device."""
        ...

    @property
    def app_runner(self) -> Runner:
        """The program that holds conversations on the device."""
        ...

    @property
    def perplexity_runner(self) -> Runner:
        """The program that scores texts on the device."""
        ...

    def positions(self, role: ModelRole = "target") -> Positions:
        """Name the positions that it scores in each window."""
        ...

    def prepare(self) -> Deployment:
        """Put on the device what the container needs; what is there already is not pushed again."""
        ...

    def versions(self) -> Mapping[str, str]:
        """Return the identity of what runs on the device; deploy first if needed."""
        ...

    def sha256_of(self, file: str) -> str | None:
        """Return the hash of a deployed file, such as the runner's; deploy first if needed."""
        ...

    def generate(self, request: GenerationRequest) -> GenerationResult:
        """Run one query in a process of its own on the device."""
        ...

    def embed(self, texts: Sequence[str], *, pooled: bool = True) -> EmbeddingResult:
        """Embed texts one after another: a vector for each, or one for each of its tokens."""
        ...

    @property
    def logits_runner(self) -> Runner:
        """The program that writes the logits of decode steps on the device."""
        ...

    def decode_steps(self, windows: "Sequence[StepWindow]") -> StepLogits:
        """Decode texts step by step."""
        ...

    def converse(self, request: ConversationRequest) -> ConversationResult:
        """Hold conversations in one process on the device."""
        ...

    def windows(
        self, text: str, most: int | None = None, role: ModelRole = "target"
    ) -> Sequence[Window]:
        """Cut a text into the windows that the device scores, at most so many."""
        ...

    def score(
        self,
        windows: Sequence[Window],
        role: ModelRole = "target",
        lora: Mapping[str, float] | None = None,
    ) -> PerplexityResult:
        """Score windows with the accuracy API of the runtime on the device.

        Args:
            lora: the adapter to apply, and its strength.
        """
        ...

    def read_log(self) -> str:
        """Read the end of what the last process on the device logged; empty if there was none."""
        ...

    def clean(self) -> None:
        """Remove this run from the device; the content store stays."""
        ...
