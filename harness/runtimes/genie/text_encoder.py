"""Texts through a text encoder on a device, by Genie's embedding API."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from buildlib.container.text_embedding import TextEmbeddingConfig
from buildlib.validation import first_fault
from harness.devices.device import Device
from harness.errors import RuntimeOutputError
from harness.runtimes.base import EmbeddingResult, TextVectors
from harness.runtimes.genie.output import parse_trace
from harness.runtimes.run_folder import RunFolder, runner_command

CONFIG, OUTPUT, SUMMARY, PROFILE = "query_config.json", "output.raw", "summary.json", "profile.json"
_PROMPTS = "prompts.json"
_PROMPT = "prompt.txt"
_LOGGED = "output.txt"
_TRACE = "trace.json"
_MICROSECONDS = 1e-6
_FLOAT_BYTES = 4
_MOST_VALUES = 1 << 28

_Size = Annotated[int, Field(ge=1, le=_MOST_VALUES)]


class _Embedded(BaseModel):
    model_config = ConfigDict(extra="ignore")

    shape: Annotated[tuple[_Size, ...], Field(min_length=1, max_length=8)]
    seconds: Annotated[float, Field(gt=0, le=1e6)]


class _Summary(BaseModel):
    model_config = ConfigDict(extra="ignore")

    format: Annotated[int, Field(ge=1, le=1)]
    init_s: Annotated[float, Field(ge=0, le=1e6)]
    embeddings: list[_Embedded]


@dataclass(frozen=True)
class EncoderRun:
    """Runs an encoder in a run folder.

    Attributes:
        runner: the SDK's program, which takes one text, or ours, which takes many.
        limit_s: the time limit of a process, by the number of its texts.
        logging: options of the runner for Genie's own log.
        trace: whether our runner writes a trace.
    """

    device: Device
    folder: RunFolder
    runner: str
    limit_s: Callable[[int], float]
    logging: tuple[str, ...] = ()
    trace: bool = False

    def embed(self, texts: Sequence[str], config: TextEmbeddingConfig) -> EmbeddingResult:
        """Embed texts one after another."""
        self.folder.send({CONFIG: config.to_json()})
        if self.runner.endswith(".py"):
            return self._embed_together(texts)
        alone = [self._embed_alone(text, config) for text in texts]
        return EmbeddingResult(
            tuple(result.vectors[0] for result in alone), alone[-1].metrics, alone[-1].profile
        )

    def _embed_together(self, texts: Sequence[str]) -> EmbeddingResult:
        self.folder.send({_PROMPTS: json.dumps(list(texts), ensure_ascii=False)})
        command = [*self._command(), "--prompts_file", _PROMPTS, "--summary", SUMMARY]
        command += ["--trace", _TRACE] if self.trace else []
        memory = self._run(command, len(texts))
        text = self.folder.read(SUMMARY)
        try:
            summary = _Summary.model_validate_json(text)
        except ValidationError as error:
            raise self._odd(f"unreadable summary: {first_fault(error, _Summary)}") from error
        if len(summary.embeddings) != len(texts):
            raise self._odd(f"{len(summary.embeddings)} embeddings of {len(texts)} texts")
        shapes = [embedded.shape for embedded in summary.embeddings]
        vectors = [
            TextVectors(embedded.shape, data, embedded.seconds)
            for embedded, data in zip(summary.embeddings, self._read_vectors(shapes), strict=True)
        ]
        metrics = {"init_s": summary.init_s, **memory}
        traced = parse_trace(self.folder.read(_TRACE), self.device.serial) if self.trace else ""
        return EmbeddingResult(tuple(vectors), metrics, self.folder.read(PROFILE), traced)

    def _embed_alone(self, text: str, config: TextEmbeddingConfig) -> EmbeddingResult:
        """Embed one text by the vendor's program, which tells no shape."""
        self.folder.send({_PROMPT: text})
        memory = self._run([*self._command(), "--prompt_file", _PROMPT], 1)
        profile = self.folder.read(PROFILE)
        init_s, seconds = self._times(profile)
        width = config.embedding.context.embed_size
        data = self.folder.pull(OUTPUT)
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

    def _run(self, command: Sequence[str], texts: int) -> Mapping[str, float]:
        timeout_s = self.limit_s(texts)
        outcome = self.folder.run(command, name=self.runner, timeout_s=timeout_s, stdout=_LOGGED)
        return outcome.memory

    def _read_vectors(self, shapes: Sequence[tuple[int, ...]]) -> list[bytes]:
        data = self.folder.pull(OUTPUT)
        sizes = [_FLOAT_BYTES * math.prod(shape) for shape in shapes]
        if len(data) != sum(sizes):
            raise self._odd(f"{len(data)} bytes of embeddings, not {sum(sizes)}")
        pieces, start = [], 0
        for size in sizes:
            pieces.append(data[start : start + size])
            start += size
        return pieces

    def _odd(self, reason: str) -> RuntimeOutputError:
        return RuntimeOutputError(self.device.serial, f"{self.runner}: {reason}")
