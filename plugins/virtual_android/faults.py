"""Faults of a virtual device, written as one line of text each: `drop:bytes=100000`.

A fault strikes at an activity (`when`): a push, a pull, a listing, a shell command, a run (a shell
command that starts `run.sh`), a forwarded connection. `throttle` and `full` are states: they hold
from the moment they are injected until they are cleared.
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, Final, Literal, get_args

from harness.errors import VirtualDeviceError

When = Literal["any", "push", "pull", "list", "shell", "run", "forward"]
RunnerSignal = Literal["KILL", "STOP"]
DspCause = Literal["path", "skeleton", "architecture", "runtime"]

ALWAYS: Final = 0
"""The `count` of a fault that strikes until it is cleared."""

_ALWAYS = "always"
_MAX_TEXT = 400
_INTEGER = re.compile(r"\d{1,18}")
_NUMBER = re.compile(r"(\d{1,18}(\.\d{1,25})?(e[+-]?\d{1,3})?|inf)")
_WORD = re.compile(r"[A-Za-z0-9_./+-]{1,80}")
_INF = math.inf
_Bounds = Mapping[str, tuple[float, float]]
_Choices = Mapping[str, Collection[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedFault:
    """One fault; `str()` gives the text that `parse_fault` reads.

    Attributes:
        when: kind of activity that it strikes at.
        count: how often it strikes; `ALWAYS` until it is cleared.
        seed: of random choices, such as which bytes are corrupted.
    """

    bounds: ClassVar[_Bounds] = {}
    choices: ClassVar[_Choices] = {}

    when: When = "any"
    count: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name, choices in {"when": get_args(When), **self.choices}.items():
            if getattr(self, name) not in choices:
                raise VirtualDeviceError(f"fault {self}: `{name}` is one of {', '.join(choices)}")
        limits = {"count": (0.0, 1e6), "seed": (0.0, 2.0**63), **self.bounds}
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if not low <= value <= high:
                reason = f"`{name}` is between {low:g} and {high:g}"
                raise VirtualDeviceError(f"fault {self}: {reason}")

    @property
    def kind(self) -> str:
        """Its name in texts."""
        return type(self).__name__.lower()

    def __str__(self) -> str:
        parts = [
            f"{field.name}={_format(field.name, getattr(self, field.name))}"
            for field in sorted(fields(self), key=lambda field: field.name in _COMMON)
            if getattr(self, field.name) != field.default
        ]
        return f"{self.kind}:{','.join(parts)}" if parts else self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop(InjectedFault):
    """Connections break once `bytes` have passed in matching activities."""

    bounds: ClassVar[_Bounds] = {"bytes": (0, 1e15)}
    bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall(InjectedFault):
    """Connections pass nothing for `seconds`, by default until it is cleared; processes go on.

    Attributes:
        bytes: how much passes before, in matching activities.
    """

    bounds: ClassVar[_Bounds] = {"seconds": (0, _INF), "bytes": (0, 1e15)}
    seconds: float = _INF
    bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrupt(InjectedFault):
    """The `file`-th file that arrives has `flips` bits flipped, and is reported as received.

    After a strike the count starts again. An empty file cannot be corrupted; the next one is.
    """

    bounds: ClassVar[_Bounds] = {"file": (1, 1e6), "flips": (1, 1e4)}
    when: When = "push"
    file: int = 1
    flips: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Full(InjectedFault):
    """A state: `/data` takes only `free` more bytes; deleting frees space. Refusals are strikes."""

    bounds: ClassVar[_Bounds] = {"free": (0, 1e15)}
    when: When = "push"
    count: int = ALWAYS
    free: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reboot(InjectedFault):
    """The device reboots `after` seconds into an activity."""

    bounds: ClassVar[_Bounds] = {"after": (0, 1e6)}
    after: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Power(InjectedFault):
    """The power is cut `after` seconds into an activity.

    Attributes:
        off: seconds until it returns; `inf`: until it is restored by command.
        unsynced: files of `/data` changed in so many seconds before, and since the last `sync`
            on the device, are empty afterwards.
    """

    bounds: ClassVar[_Bounds] = {"after": (0, 1e6), "off": (0, _INF), "unsynced": (0, 1e6)}
    after: float = 0.0
    off: float = 1.0
    unsynced: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Throttle(InjectedFault):
    """A state: the device's processes get 1/`factor` of their time."""

    bounds: ClassVar[_Bounds] = {"factor": (1, 100), "count": (ALWAYS, ALWAYS)}
    count: int = ALWAYS
    factor: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner(InjectedFault):
    """Processes of a command are killed, or hang, `after` seconds into it.

    Attributes:
        match: text in the command line of the processes, shells excepted. The fault waits for
            one until the command ends.
    """

    bounds: ClassVar[_Bounds] = {"after": (0, 1e6)}
    choices: ClassVar[_Choices] = {"signal": get_args(RunnerSignal)}
    when: When = "run"
    signal: RunnerSignal = "KILL"
    after: float = 0.0
    match: str = "genie"

    def __post_init__(self) -> None:
        if not _WORD.fullmatch(self.match):
            raise VirtualDeviceError(f"fault {self}: `match` is a word")
        InjectedFault.__post_init__(self)


_SETUP = (
    "<E> Failed to create transport for device, error: {0}",
    "<E> Failed to load skel, error: {0}",
)
_CONTEXT = '[ERROR] "Could not create context from binary for context index = 0 : err {0}"'
DSP_MESSAGES: Final[Mapping[DspCause, tuple[str, ...]]] = {
    # github.com/pytorch/executorch/issues/2788
    "path": (
        "<E> DspTransport.openSession qnn_open failed, 0x80000406, prio 100",
        "<E> IDspTransport: Unable to load lib 0x80000406",
        *(line.format(1008) for line in _SETUP),
        "<E> Transport layer setup failed: 14001",
    ),
    # github.com/qualcomm/fastrpc/issues/379
    "skeleton": (
        "Error 0x80000442: remote_handle64_open failed (user err 0x80000600)",
        "<E> DspTransport.openSession qnn_open failed, 0x80000600, prio 100",
        *(line.format(4000) for line in _SETUP),
        "<E> Transport layer setup failed: 14001",
    ),
    # github.com/qualcomm/ai-hub-models/issues/101
    "architecture": (_CONTEXT.format(1009), "Failure to initialize model"),
    # github.com/qualcomm/ai-hub-apps/issues/148
    "runtime": (_CONTEXT.format(5000), "Failure to initialize model"),
}
"""What users of phones saw, by its cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dsp(InjectedFault):
    """A process that loads libQnnHtp.so prints a phone's error messages, and aborts.

    The emulator has no DSP that could refuse anything.

    Attributes:
        cause: `path`: no skeleton is in `ADSP_LIBRARY_PATH`; `skeleton`: it is of another SDK;
            `architecture`: the binaries are of another SoC; `runtime`: the libraries are older
            than they.
    """

    choices: ClassVar[_Choices] = {"cause": DSP_MESSAGES}
    when: When = "run"
    cause: DspCause = "path"
    after: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Babble(InjectedFault):
    """Commands print `bytes` of garbage in place of their own stdout, `inf` without end.

    Attributes:
        match: text in the command; all commands without it.
    """

    bounds: ClassVar[_Bounds] = {"bytes": (0, _INF)}
    when: When = "shell"
    bytes: float = 4096.0
    match: str = ""

    def __post_init__(self) -> None:
        if self.match and not _WORD.fullmatch(self.match):
            raise VirtualDeviceError(f"fault {self}: `match` is a word")
        InjectedFault.__post_init__(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow(InjectedFault):
    """Every packet takes `ms` milliseconds more, and no more than `rate` bytes/s pass."""

    bounds: ClassVar[_Bounds] = {"ms": (0, 1e6), "rate": (1, _INF), "count": (ALWAYS, ALWAYS)}
    count: int = ALWAYS
    ms: float = 0.0
    rate: float = _INF


KINDS: Final[Mapping[str, type[InjectedFault]]] = {
    kind.__name__.lower(): kind
    for kind in (Drop, Stall, Corrupt, Full, Reboot, Power, Throttle, Runner, Dsp, Babble, Slow)
}
_COMMON = frozenset(field.name for field in fields(InjectedFault))


def parse_fault(text: str) -> InjectedFault:
    """Read `KIND` or `KIND:NAME=VALUE,...`.

    >>> parse_fault("power:after=0.5,off=2,when=run")
    Power(when='run', count=1, seed=0, after=0.5, off=2.0, unsynced=5.0)
    """
    if len(text) > _MAX_TEXT:
        raise VirtualDeviceError(f"fault {text!r}: too long")
    name, colon, rest = text.strip().partition(":")
    kind = KINDS.get(name)
    if kind is None:
        raise VirtualDeviceError(f"fault {text!r}: known are {', '.join(KINDS)}")
    defaults = {field.name: field.default for field in fields(kind)}
    values: dict[str, object] = {}
    for part in rest.split(",") if colon else []:
        key, equals, value = part.partition("=")
        if key not in defaults or not equals or key in values:
            raise VirtualDeviceError(
                f"fault {text!r}: {name} takes {', '.join(defaults)}, each once"
            )
        values[key] = _parse(text, key, value, defaults[key])
    return kind(**values)  # type: ignore[arg-type]


def _parse(text: str, key: str, value: str, like: object) -> object:
    if isinstance(like, str) and _WORD.fullmatch(value):
        return value
    if isinstance(like, float) and _NUMBER.fullmatch(value):
        return float(value)
    if isinstance(like, int):
        if key == "count" and value == _ALWAYS:
            return ALWAYS
        if _INTEGER.fullmatch(value):
            return int(value)
    raise VirtualDeviceError(f"fault {text!r}: `{key}` cannot be {value!r}")


def _format(key: str, value: object) -> str:
    if key == "count" and value == ALWAYS:
        return _ALWAYS
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)
