"""Records that readers of other tools' files give: runs as a file tells of them, and faults."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from harness.errors import MetricError
from harness.results.metrics import Measurement
from harness.results.records import JsonScalar
from harness.runtimes.json_values import Entry


class UnreadableError(ValueError):
    """A line, or an entry that begins there, cannot be read.

    Attributes:
        line: from 1.
    """

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line
        self.reason = reason


Reader = Callable[[str], "Iterator[ForeignRun | UnreadableError]"]
"""Reads a file's text; it raises `UnreadableError` where it cannot go on."""
Entries = Iterator[tuple[int, Entry] | UnreadableError]
"""What a file tells of each test, with its line."""


@dataclass(slots=True)
class ForeignRun:
    """One run of another tool, as far as its file tells.

    Attributes:
        line: where it begins in the file, from 1.
        runner: the program that ran.
        source: the text that tells of it, by which it is known when it is imported again.
        model: the model's name; empty if the file does not tell.
        precision: bits, in the tool's words.
        device_model: model of the device, and its processor or backend, as far as told.
        created_at: when it began, if the file tells.
        before_end_s: seconds from its beginning to the last thing that the file tells of, where
            its clock has no date.
        settings: other facts about the measurement.
        versions: of the tool and its parts.
        labels: names that the user gave the test.
        repetitions: metrics of each measured repetition.
        session: metrics that were measured once.
    """

    line: int
    runner: str
    source: str
    model: str = ""
    precision: str | None = None
    prompt_tokens: int | None = None
    depth_tokens: int | None = None
    new_tokens: int | None = None
    device_model: str | None = None
    container_bytes: int | None = None
    parameters: int | None = None
    created_at: datetime | None = None
    before_end_s: float = 0.0
    settings: Mapping[str, JsonScalar] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    repetitions: list[dict[str, float]] = field(default_factory=list)
    session: dict[str, float] = field(default_factory=dict)

    def measurements(self) -> tuple[Measurement, ...]:
        """Make the records of all values but zeros: of what a tool did not measure, it writes 0."""
        rows = [*enumerate(self.repetitions), (0, self.session)]
        try:
            result = tuple(
                Measurement(metric=key, value=float(value), repetition=number)
                for number, values in rows
                for key, value in values.items()
                if value
            )
        except MetricError as error:
            raise UnreadableError(self.line, str(error)) from error
        if not result:
            raise UnreadableError(self.line, "it has no figure")
        return result


@dataclass(frozen=True, slots=True)
class FileFormat:
    """One kind of file of a tool.

    Attributes:
        mark: regular expression of a text that only such files have.
        kind: of artifact that the file is kept as.
    """

    mark: str
    read: Reader
    kind: Literal["profile", "log"] = "profile"
