"""What befalls whom in a case: drawn from its seed and number alone."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from plugins.virtual_android.faults import (
    Corrupt,
    Drop,
    Full,
    InjectedFault,
    Power,
    Reboot,
    Runner,
    RunnerSignal,
    Slow,
    Stall,
    Throttle,
    When,
)

Scene = Literal["push", "run", "genie", "lease", "ledgers"]
ActKind = Literal["adb_kill", "kill", "terminate", "suspend", "release"]
T = TypeVar("T")

DEVICES = 2
"""In each of a lab's farms."""
TOKEN = "chaos-token"
"""What runs on a device in a scene has it among its arguments."""

_WHEN: dict[Scene, tuple[When, ...]] = {
    "push": ("any", "push", "push", "shell", "list"),
    "run": ("any", "shell", "shell"),
    "genie": ("any", "push", "shell", "run", "run"),
    "lease": ("any", "shell", "shell", "forward"),
    "ledgers": ("any", "shell", "shell", "forward"),
}
_RUNNER_WHEN: dict[Scene, When] = {
    "run": "shell",
    "lease": "shell",
    "ledgers": "shell",
    "genie": "run",
}
_KINDS: dict[Scene, str] = {
    "push": "drop drop stall corrupt corrupt full reboot power throttle slow adb_kill kill release",
    "run": "drop stall reboot power throttle slow runner runner full adb_kill kill terminate"
    " release release",
    "genie": "drop stall corrupt corrupt reboot power throttle runner runner full adb_kill kill"
    " terminate release",
    "lease": "drop stall reboot power runner slow adb_kill kill kill suspend suspend release"
    " release",
    "ledgers": "drop stall reboot power runner slow adb_kill kill kill suspend suspend",
}
_ACTS: tuple[ActKind, ...] = ("adb_kill", "kill", "terminate", "suspend", "release")
_SCENES: dict[Scene, int] = {"push": 30, "run": 31, "lease": 21, "ledgers": 8, "genie": 4}
_SEVERAL = {"lease", "ledgers"}


@dataclass(frozen=True, slots=True)
class HostAct:
    """Something that befalls this host.

    Attributes:
        after_s: from when the actors begin.
        actor: number of the one that a signal goes to; of a release, the device's.
        lasts_s: how long one is suspended.
    """

    kind: ActKind
    after_s: float
    actor: int = 0
    lasts_s: float = 0.0

    def __str__(self) -> str:
        lasts = f",lasts={self.lasts_s:.2f}" if self.lasts_s else ""
        return f"{self.kind}:after={self.after_s:.2f},actor={self.actor}{lasts}"


@dataclass(frozen=True, slots=True)
class Case:
    """One case.

    Attributes:
        faults: of a device, by its number.
        actors: how many processes play the scene.
        calm_s: when all faults are cleared, from when the actors begin.
    """

    seed: int
    number: int
    scene: Scene
    faults: tuple[tuple[int, InjectedFault], ...]
    acts: tuple[HostAct, ...]
    actors: int
    calm_s: float

    @property
    def count(self) -> int:
        """Of all that is to befall it."""
        return len(self.faults) + len(self.acts)

    @property
    def name(self) -> str:
        """For files and identifiers."""
        return f"case-{self.seed}-{self.number}"

    def chance(self, what: str) -> random.Random:
        """What decides about one side of the scene."""
        return random.Random(f"{self.seed}:{self.number}:{what}")  # noqa: S311 - to be repeatable

    def told(self) -> list[str]:
        """All that is to befall it, as text."""
        return [f"d{number} {fault}" for number, fault in self.faults] + [*map(str, self.acts)]


def draw(seed: int, number: int) -> Case:
    """The case of that number."""
    chance = random.Random(f"{seed}:{number}")  # noqa: S311 - to be repeatable
    scene = chance.choices([*_SCENES], [*_SCENES.values()])[0]
    actors = chance.randint(2, 3) if scene in _SEVERAL else 1
    faults: list[tuple[int, InjectedFault]] = []
    acts: list[HostAct] = []
    for _ in range(chance.choices([1, 2, 3], [60, 30, 10])[0]):
        kind = chance.choice(_KINDS[scene].split())
        if kind in _ACTS:
            acts.append(_act(chance, kind, actors))
        else:
            faults.append((_device(chance, scene), _fault(chance, kind, scene)))
    calm_s = chance.uniform(3.0, 7.0)
    return Case(seed, number, scene, tuple(faults), tuple(acts), actors, calm_s)


def cases_with(seed: int, faults: int) -> int:
    """How many cases of a seed have at least so many faults together."""
    number = 0
    while faults > 0:
        faults -= draw(seed, number).count
        number += 1
    return number


def pick(chance: random.Random, choices: Sequence[T], weights: Sequence[float]) -> T:
    """One of them."""
    return chance.choices(choices, weights)[0]


def _device(chance: random.Random, scene: Scene) -> int:
    """Pushes go to the first, and a plan has a reason to take that first."""
    return 0 if scene == "push" else pick(chance, range(DEVICES), (3, 1))


def _act(chance: random.Random, kind: ActKind, actors: int) -> HostAct:
    lasts_s = chance.uniform(0.5, 6.0) if kind == "suspend" else 0.0
    actor = chance.randrange(actors)
    if kind == "release":  # the first device is used most
        actor = pick(chance, range(DEVICES), (3, 1))
    after_s = chance.uniform(0.0, 1.5 if kind == "release" else 0.9)
    return HostAct(kind, after_s, actor, lasts_s)


def _fault(chance: random.Random, kind: str, scene: Scene) -> InjectedFault:
    when = chance.choice(_WHEN[scene])
    count = pick(chance, (1, 2, 3), (8, 1, 1))
    seed = chance.randrange(1 << 30)
    some = _bytes(chance, 23 if scene in {"push", "genie"} else 10)
    if kind == "drop":
        return Drop(when=when, count=count, bytes=some)
    if kind == "stall":
        seconds = pick(chance, (chance.uniform(0.1, 3.0), math.inf), (4, 1))
        return Stall(when=when, seconds=round(seconds, 2), bytes=some)
    if kind == "corrupt":
        file = chance.randint(1, chance.choice([1, 3, 12]))
        return Corrupt(count=count, seed=seed, file=file, flips=chance.randint(1, 9))
    if kind == "full":
        return Full(free=chance.choice([0, 4096, _bytes(chance, 22)]))
    after = round(chance.uniform(0.0, 0.8), 2)
    if kind == "reboot":
        return Reboot(when=when, after=after)
    if kind == "power":
        off = pick(chance, (round(chance.uniform(0.1, 1.5), 2), math.inf), (9, 1))
        unsynced = pick(chance, (0.0, 5.0, 60.0), (1, 2, 1))
        return Power(when=when, after=after, off=off, unsynced=unsynced)
    if kind == "throttle":
        return Throttle(factor=round(chance.uniform(1.5, 8.0), 1))
    if kind == "slow":
        rate = float(1 << chance.randint(18, 24))
        return Slow(when=when, ms=round(chance.uniform(0.5, 20.0), 1), rate=rate)
    signals: tuple[RunnerSignal, ...] = ("KILL", "KILL", "STOP")
    return Runner(
        when=_RUNNER_WHEN[scene],
        count=count,
        signal=chance.choice(signals),
        after=round(chance.uniform(0.0, 0.4), 2),
        match="genie" if scene == "genie" else TOKEN,
    )


def _bytes(chance: random.Random, bits: int) -> int:
    """Small and large ones alike."""
    return chance.randrange(1 << chance.randint(0, bits))
