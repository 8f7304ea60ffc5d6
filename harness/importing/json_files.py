"""Reader of JSON, and of Genie's profiles.

Source of the latter: "Genie Profile" in the Genie documentation, docs.qualcomm.com 80-63442-10.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime

from harness.importing.records import Entries, ForeignRun, Reader, UnreadableError
from harness.runtimes.genie.output import REQUIRED, figures_of
from harness.runtimes.json_values import UNREADABLE, Entry, reason_of

_MOST_FAULTS = 1000
"""Lines that cannot be read, after which the rest of a file is not looked at."""
_SPACE = re.compile(r"[\s,]*")
_ARRAY = re.compile(r"\[[ \t]*(?:\r?\n|[{\]]|\Z)")
_KEY = re.compile(r'"\w+"\s*:')
_NEXT_OBJECT = re.compile(r"^[\[{]", re.MULTILINE)


def of_entries(
    read: Callable[[int, Entry], Iterable[ForeignRun]],
    entries: Callable[[str], Entries] | None = None,
) -> Reader:
    """Make the reader of a file from that of one entry; of JSON, where nothing else is said."""

    def reader(text: str) -> Iterator[ForeignRun | UnreadableError]:
        for item in (entries or read_entries)(text):
            if isinstance(item, UnreadableError):
                yield item
                continue
            line, entry = item
            try:
                yield from read(line, entry)
            except UnreadableError as error:
                yield error
            except UNREADABLE as error:
                yield UnreadableError(line, reason_of(error))

    return reader


def read_entries(text: str) -> Entries:
    """Read all objects, each with its first line: of arrays, of lines, or the only one.

    Lines of no JSON between them, which the tool printed meanwhile, are left out.
    """
    decoder = json.JSONDecoder()
    position, line, counted_to, faults, in_array = 0, 1, 0, 0, False
    while (position := _SPACE.match(text, position).end()) < len(text):  # type: ignore[union-attr]
        line, counted_to = line + text.count("\n", counted_to, position), position
        fault = None
        if text[position] == "{":
            try:
                entry, position = decoder.raw_decode(text, position)
            except RecursionError:
                fault = UnreadableError(line, "it is nested too deep")
            except ValueError as error:
                at = getattr(error, "lineno", line)
                fault = UnreadableError(at, f"it is no JSON: {getattr(error, 'msg', error)}")
            else:
                yield line, entry
        elif text[position] == "]" or _ARRAY.match(text, position):
            in_array = text[position] == "["
            position += 1
        else:
            end = text.find("\n", position)
            end = len(text) if end < 0 else end
            if _KEY.search(text, position, end):
                fault = UnreadableError(line, "it is no JSON: it is not the beginning of an object")
            position = end
        if fault is not None:
            faults += 1
            if in_array or faults > _MOST_FAULTS:
                raise fault
            yield fault
            following = _NEXT_OBJECT.search(text, position + 1)
            position = following.start() if following else len(text)
    if in_array:
        raise UnreadableError(text.count("\n") + 1, "the array does not end: the file is cut off")


def read_genie_profile(line: int, entry: Entry) -> Iterator[ForeignRun]:
    """Read each query of a profile, as `genie-t2t-run --profile` writes it.

    Figures of the dialog's creation belong to its first query. `start` and `stop` are microseconds
    since the device started, or since 1970.
    """
    has_query = False
    for component in entry["components"]:
        of_dialog: dict[str, float] = {}
        end = max((float(event.get("stop", 0)) for event in component["events"]), default=0.0)
        for event in component["events"]:
            try:
                figures = figures_of(event)
            except (TypeError, ValueError) as error:
                raise UnreadableError(line, f"unreadable Genie profile: {error}") from error
            if not figures.keys() - {"init_s"}:  # creation, or a query that filled the context
                of_dialog |= figures
                continue
            has_query = True
            if absent := REQUIRED - {"init_s"} - figures.keys():
                raise UnreadableError(line, f"a query lacks {', '.join(sorted(absent))}")
            if figures["generated_tokens"] < 2:  # no token came after the first
                figures.pop("decode_tokens_per_s", None)
            start = float(event.get("start", end))
            yield ForeignRun(
                line,
                "genie-t2t-run",
                source=canonical(event),
                prompt_tokens=int(figures["prompt_tokens"]),
                created_at=moment_of(start * 1e-6),
                before_end_s=max(0.0, end - start) * 1e-6,
                repetitions=[{**of_dialog, **figures}],
            )
            of_dialog = {}
    if not has_query:
        raise UnreadableError(line, "the Genie profile has no query with figures")


def canonical(entry: Entry) -> str:
    """Return the text of an object without its layout."""
    return json.dumps(entry, sort_keys=True, ensure_ascii=False)


def moment_of(seconds: float) -> datetime | None:
    """Return a time by a clock that counts from 1970; None for a clock that does not."""
    plausible = 1_262_304_000 < seconds < 4_102_444_800  # 2010 to 2100
    return datetime.fromtimestamp(seconds, UTC) if plausible else None
