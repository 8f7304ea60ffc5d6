"""Genie validator: the parser of the real libGenie, in a child process.

Genie checks a text against its own schema and opens no file, so this needs neither the binaries
nor a device.
"""

import json
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from buildlib.container.manifest import GENIE_CONFIG
from buildlib.errors import InputFileError
from buildlib.toolchains.child_process import Step, run_step
from buildlib.toolchains.ort_qnn.wheel import find_libraries
from buildlib.validation import Fault

_WORKER = "buildlib.container.genie_validator_worker"
_TIMEOUT_S = 60.0
_SAYS_NOTHING = re.compile(
    r"at least one subschema has failed, but all of them are required to validate( - )?"
)
_EMBEDS = re.compile(rb'\s*\{\s*"embedding"\s*:')
_HEADINGS = ("Failed to validate", "# LIBNATIVE", "Error:")
_AT = re.compile(r"at '(?P<pointer>/[^']*)': (?P<reason>.*)")
_OF_A_KEY = (
    (re.compile(r"required property '([^']+)' not found in object"), "it is missing"),
    (re.compile(r"validation failed for additional property '([^']+)'.*"), "unknown key"),
)
_WORDS = {
    "the subschema has succeeded, but it is required to not validate": (
        "keys that exclude each other stand together in it"
    ),
    "no subschema has succeeded, but one of them is required to validate": (
        "it has none of the forms that are allowed"
    ),
}


@dataclass(frozen=True)
class GenieFunction:
    """Function of the Genie C API that creates a configuration from JSON.

    Attributes:
        root: JSON pointer of the place that its messages call `/`.
    """

    name: str
    root: str = ""


EXTENSIONS = GenieFunction("GenieDialog_create")
"""Reads backend extensions by QNN's library for them, which says neither where nor why it cannot.

Genie then goes on without: no setting of the file has an effect."""
NODE = "GenieNode_create"
"""Judges a configuration of a node, which `GenieNodeConfig_createFromJson` takes as it is."""
_OF_A_SCHEMA = ("validation failed", "[json.exception", "Unknown config key")
_NOT_READ = "Failure in loading backend extensions"
_READ = "Can't access model file"
DIALOG = GenieFunction("GenieDialogConfig_createFromJson", "/dialog")
EMBEDDING = GenieFunction("GenieEmbeddingConfig_createFromJson")


@dataclass(frozen=True)
class GenieVerdict:
    """Genie's answer to one configuration.

    Attributes:
        status: of the function; above 0 the signal that ended Genie.
        faults: all that it found; none if it takes the configuration.
    """

    status: int
    faults: tuple[Fault, ...]


def ask_genie(
    questions: Sequence[tuple[GenieFunction, bytes]], *, timeout_s: float = _TIMEOUT_S
) -> list[GenieVerdict]:
    """Let Genie judge any number of texts, in one child process."""
    step = Step(_WORKER, "judge", Path("genie"), timeout_s, find_libraries().search_path)
    request = [[function.name, text.decode("latin-1")] for function, text in questions]
    answers = run_step(step, json.dumps(request).encode())
    return [
        GenieVerdict(answer["status"], _faults(function, answer["status"], answer["said"]))
        for (function, _), answer in zip(questions, answers, strict=True)
    ]


def check_genie_config(folder: Path) -> None:
    """Let Genie validate the `genie_config.json` in a folder."""
    path = folder / GENIE_CONFIG
    try:
        text = path.read_bytes()
    except OSError as error:
        raise InputFileError(str(path), error.strerror or str(error)) from error
    check_genie_text(text, str(path))


def check_genie_text(text: bytes, path: str) -> None:
    """Let Genie validate the text of a dialog, or of an embedding; errors call it `path`."""
    function = EMBEDDING if _EMBEDS.match(text) else DIALOG
    verdict = ask_genie([(function, text)])[0]
    answer = "; ".join(map(str, verdict.faults))[:1000]
    if verdict.faults:
        raise InputFileError(path, f"Genie refuses it: {answer}")


def _faults(function: GenieFunction, status: int, output: str) -> tuple[Fault, ...]:
    """Return Genie's messages as faults with JSON pointers of the whole document."""
    if status == 0:
        return ()
    if status > 0:
        name = signal.Signals(status).name
        return (Fault((), "died", f"Genie was ended by {name}"),)
    if function == EXTENSIONS and _NOT_READ in output:
        return (Fault((), "genie", "it cannot be read: Genie would run without all of it"),)
    if function == EXTENSIONS and _READ in output:
        return ()
    if function.name == NODE and not any(words in output for words in _OF_A_SCHEMA):
        return ()
    faults = dict.fromkeys(_fault(function, line) for line in _lines(output))
    return tuple(faults) or (Fault((), "status", f"status {status}"),)


def _lines(output: str) -> Iterator[str]:
    for line in output.splitlines():
        words = _SAYS_NOTHING.sub("", line).strip().removeprefix("- ")
        if words and not words.startswith(_HEADINGS):
            yield words


def _fault(function: GenieFunction, line: str) -> Fault:
    located = _AT.fullmatch(line)
    if located is None:
        return Fault((), "genie", line)
    steps = [step for step in (function.root + located["pointer"]).split("/") if step]
    reason = _WORDS.get(located["reason"], located["reason"])
    for wording, plain in _OF_A_KEY:
        if key := wording.fullmatch(reason):
            steps, reason = [*steps, key[1]], plain
    return Fault(tuple(int(s) if s.isdecimal() else s for s in steps), "genie", reason)
