"""Texts through a text encoder on a device, by Genie's embedding API."""

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from buildlib.container.text_embedding import TextEmbeddingConfig
from buildlib.validation import first_fault
from harness.devices.device import Device
from harness.errors import DeviceError, RunnerError, RuntimeChoiceError, RuntimeOutputError
from harness.runtimes.bundles.sources import NAMED
from harness.runtimes.deployed import RunFolder, runner_command
from harness.runtimes.genie.output import parse_trace
from harness.runtimes.genie.runtime import GenieRuntime

SDK_RUNNER, RUNNER = "genie-t2e-run", "genie_t2e_run.py"
_SCRIPTS = Path(__file__).with_name("on_device")
CONFIG, OUTPUT, SUMMARY, PROFILE = "query_config.json", "output.raw", "summary.json", "profile.json"
_PROMPTS = "prompts.json"
_PROMPT = "prompt.txt"
_LOGGED = "output.txt"
_TRACE = "trace.json"
_MICROSECONDS = 1e-6
_FLOAT_BYTES = 4
_MOST_VALUES = 1 << 28
_MORE_BYTES = 64 << 20
"""So much an unfinished process may write while its vectors are read."""

_Size = Annotated[int, Field(ge=1, le=_MOST_VALUES)]


class _Start(BaseModel):
    """First line of a summary."""

    model_config = ConfigDict(extra="ignore")

    format: Annotated[int, Field(ge=2, le=2)]
    init_s: Annotated[float, Field(ge=0, le=1e6)]


class _Embedded(BaseModel):
    """Each further line."""

    model_config = ConfigDict(extra="ignore")

    shape: Annotated[tuple[_Size, ...], Field(min_length=1, max_length=8)]
    seconds: Annotated[float, Field(gt=0, le=1e6)]


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

    def array(self) -> npt.NDArray[np.float32]:
        """Return the values."""
        return np.frombuffer(self.data, "<f4").reshape(self.shape).astype(np.float32)


OnVectors = Callable[[Sequence[TextVectors]], None]


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


def embed_texts(
    runtime: GenieRuntime,
    texts: Sequence[str],
    config: TextEmbeddingConfig,
    on_vectors: OnVectors | None = None,
) -> EmbeddingResult:
    """Embed texts one after another by Genie: a vector for each, or one for each of its tokens.

    Args:
        config: of the container, pooled or not.
        on_vectors: called now and then with the vectors of all texts so far.
    """
    runner = find_runner(runtime)
    if not runtime.has_python and runner == RUNNER:
        reason = f"the SDK has no {SDK_RUNNER} for it, and ours needs Python: {NAMED}"
        raise RuntimeChoiceError(runtime.device.serial, reason)
    run = EncoderRun(
        runtime.device, runtime.folder(), runner, runtime.limit_s, tuple(runtime.logging),
        trace=runtime.options.trace, on_vectors=on_vectors,
    )  # fmt: skip
    return run.embed(texts, config)


def with_output(config: TextEmbeddingConfig, *, pooled: bool) -> TextEmbeddingConfig:
    """Return a copy that answers with one vector for a text, or with one for each token."""
    values = config.embedding.model_dump(by_alias=True, exclude_none=True)
    htp = values["engine"]["backend"].get("QnnHtp")
    if htp is None:
        raise ValueError("only the HTP backend has a choice of outputs")
    htp["pooled-output"] = pooled
    return TextEmbeddingConfig.model_validate({"embedding": values})


def find_runner(runtime: GenieRuntime) -> str:
    """Return the SDK's program where it is, else ours."""
    return SDK_RUNNER if SDK_RUNNER in runtime.bundle.files else RUNNER


@dataclass(frozen=True)
class EncoderRun:
    """Runs an encoder in a run folder.

    Attributes:
        runner: the SDK's program, which takes one text, or ours, which takes many.
        limit_s: the time limit of a process, by the number of its texts.
        logging: options of the runner for Genie's own log.
        trace: whether our runner writes a trace.
        on_vectors: as `embed_texts` has it.
    """

    device: Device
    folder: RunFolder
    runner: str
    limit_s: Callable[[int], float]
    logging: tuple[str, ...] = ()
    trace: bool = False
    on_vectors: OnVectors | None = None

    def embed(self, texts: Sequence[str], config: TextEmbeddingConfig) -> EmbeddingResult:
        """Embed texts one after another."""
        self.folder.send({CONFIG: config.to_json()})
        if self.runner == RUNNER:
            self.folder.send({RUNNER: _SCRIPTS.joinpath(RUNNER).read_text(encoding="utf-8")})
            return self._embed_together(texts)
        vectors: list[TextVectors] = []
        for text in texts:
            alone = self._embed_alone(text, config)
            vectors += alone.vectors
            if self.on_vectors is not None:
                self.on_vectors(vectors)
        return EmbeddingResult(tuple(vectors), alone.metrics, alone.profile)

    def _embed_together(self, texts: Sequence[str]) -> EmbeddingResult:
        prompts = json.dumps(list(texts), ensure_ascii=False)
        self.folder.send({_PROMPTS: prompts, SUMMARY: ""})  # none of an earlier run is told
        command = [*self._command(), "--prompts_file", _PROMPTS, "--summary", SUMMARY]
        command += ["--trace", _TRACE] if self.trace else []
        try:
            memory = self._run(command, len(texts), replace(self.folder, on_running=self._running))
        except RunnerError:
            self._tell()
            raise
        start, vectors = self._read_vectors()
        if len(vectors) != len(texts):
            raise self._odd(f"{len(vectors)} embeddings of {len(texts)} texts")
        metrics = {"init_s": start.init_s, **memory}
        traced = parse_trace(self.folder.read(_TRACE), self.device.serial) if self.trace else ""
        return EmbeddingResult(tuple(vectors), metrics, self.folder.read(PROFILE), traced)

    def _running(self, elapsed_s: float, words: str) -> None:
        if self.folder.on_running is not None:
            self.folder.on_running(elapsed_s, words)
        self._tell()

    def _tell(self) -> None:
        """Hand out the vectors that an unfinished process has written."""
        if self.on_vectors is not None:
            with suppress(DeviceError):
                self.on_vectors(self._read_vectors()[1])

    def _embed_alone(self, text: str, config: TextEmbeddingConfig) -> EmbeddingResult:
        """Embed one text by the vendor's program, which tells no shape."""
        self.folder.send({_PROMPT: text})
        memory = self._run([*self._command(), "--prompt_file", _PROMPT], 1, self.folder)
        profile = self.folder.read(PROFILE)
        init_s, seconds = self._times(profile)
        width = config.embedding.context.embed_size
        most = config.embedding.context.ctx_size * width * _FLOAT_BYTES
        data = self.folder.pull(OUTPUT, most)
        rows, rest = divmod(len(data), _FLOAT_BYTES * width)
        if rest or not rows:
            raise self._odd(f"{len(data)} bytes, no rows of {width} values")
        vectors = TextVectors((rows, width), data, seconds)
        return EmbeddingResult((vectors,), {"init_s": init_s, **memory}, profile)

    def _times(self, profile: str) -> tuple[float, float]:
        """Return the seconds to load the encoder and to embed the text, by Genie's profile."""
        try:
            events = [e for c in json.loads(profile)["components"] for e in c["events"]]
            by_type = {event["type"]: float(event["duration"]) for event in events}
            times = [by_type[f"GenieEmbedding_{name}"] for name in ("create", "generate")]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise self._odd(f"unreadable Genie profile: {error}") from error
        if not all(0 < time < math.inf for time in times):
            raise self._odd("impossible times in the Genie profile")
        return times[0] * _MICROSECONDS, times[1] * _MICROSECONDS

    def _command(self) -> list[str]:
        command = [*runner_command(self.runner), "-c", CONFIG, "--output_file", OUTPUT]
        return [*command, "--profile", PROFILE, *self.logging]

    def _run(self, command: Sequence[str], texts: int, folder: RunFolder) -> Mapping[str, float]:
        timeout_s = self.limit_s(texts)
        outcome = folder.run(command, name=self.runner, timeout_s=timeout_s, stdout=_LOGGED)
        return outcome.memory

    def _read_vectors(self) -> tuple[_Start, list[TextVectors]]:
        """Read all vectors that a summary has whole lines on."""
        first, *lines = self.folder.read(SUMMARY).split("\n")[:-1] or [""]
        try:
            start = _Start.model_validate_json(first)
            texts = [_Embedded.model_validate_json(line) for line in lines]
        except ValidationError as error:
            raise self._odd(f"unreadable summary: {first_fault(error, _Embedded)}") from error
        sizes = [_FLOAT_BYTES * math.prod(text.shape) for text in texts]
        data = self.folder.pull(OUTPUT, sum(sizes) + _MORE_BYTES)
        if len(data) < sum(sizes):
            raise self._odd(f"{len(data)} bytes of embeddings, not {sum(sizes)}")
        ends = list(itertools.accumulate(sizes))
        return start, [
            TextVectors(text.shape, data[end - size : end], text.seconds)
            for text, size, end in zip(texts, sizes, ends, strict=True)
        ]

    def _odd(self, reason: str) -> RuntimeOutputError:
        return RuntimeOutputError(self.device.serial, f"{self.runner}: {reason}")
