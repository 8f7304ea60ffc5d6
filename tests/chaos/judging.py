"""One case from beginning to end, and the verdict on it."""

import json
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType, ModuleType

from harness.errors import HarnessError
from tests.chaos import aftermath, lease_scene, push_scene, run_scene
from tests.chaos.actors import Actor, Tell, conduct
from tests.chaos.drawing import DEVICES, Case, HostAct, Scene, draw
from tests.chaos.ends import End, unexplained
from tests.chaos.lab import Farm, Lab, patient

_PATIENCE_S = 75.0
_GENIE_PATIENCE_S = 150.0
_SQUEEZED = ("full", "armed")
_SCENES: Mapping[Scene, ModuleType] = MappingProxyType(
    {
        "push": push_scene,
        "run": run_scene,
        "genie": run_scene,
        "lease": lease_scene,
        "ledgers": lease_scene,
    }
)


@dataclass
class Verdict:
    """What became of a case.

    Attributes:
        told: what was to befall it.
        struck: the kinds of what did; `strikes`: how many faults that were.
        ends: how often each end came, by outcome, with the error's type.
        wrong: what may not be; empty for a good case.
    """

    case: int
    scene: str
    told: list[str]
    struck: list[str] = field(default_factory=list)
    strikes: int = 0
    ends: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))


def run_case(lab: Lab, seed: int, number: int) -> Verdict:
    """Let a case happen, and look at it from the outside."""
    case = draw(seed, number)
    verdict = Verdict(number, case.scene, case.told())
    began = time.monotonic()
    try:
        _happen(lab, case, verdict)
    except (HarnessError, OSError) as error:
        verdict.wrong.append(f"the judge failed: {type(error).__name__}: {error}")
    verdict.seconds = round(time.monotonic() - began, 2)
    return verdict


def _happen(lab: Lab, case: Case, verdict: Verdict) -> None:
    farm = lab.roomy if case.scene == "genie" else lab.small
    if case.scene == "genie":
        run_scene.learn(lab)
    elif case.scene == "push":
        push_scene.prepare(lab, case)
    scene = _SCENES[case.scene]
    at = time.time()
    for device, fault in case.faults:
        farm.commands(device).inject(fault)
    actors = scene.begin(lab, farm, case)
    performed: list[str] = []
    people: list[Actor] = []
    acts = [
        (act.after_s, _performing(lab, farm, act, actors, performed, people)) for act in case.acts
    ]
    acts += [
        (act.after_s + act.lasts_s, _continuing(actors[act.actor]))
        for act in case.acts
        if act.kind == "suspend"
    ]
    acts.append((case.calm_s, lambda: _calm(farm)))
    conduct(actors, acts, patient(_GENIE_PATIENCE_S if case.scene == "genie" else _PATIENCE_S))
    conduct(people, [], patient(_PATIENCE_S))
    verdict.wrong += [f"{each.name}: {each.end}" for each in people if each.end["end"] != "well"]
    performed += ["release" for each in people for line in each.told if line.get("taken")]
    _calm(farm)  # from here on nothing strikes any more
    struck = _struck(farm, at) + performed
    kinds = set(struck)
    ends, complaints = scene.judge(lab, farm, case, actors, kinds)
    verdict.wrong += filter(None, (unexplained(end, kinds) for end in ends))
    verdict.wrong += complaints
    verdict.wrong += aftermath.complaints(
        lab, farm, case, kinds, untouched=not struck and case.scene not in {"lease", "ledgers"}
    )
    verdict.struck, verdict.strikes = sorted(kinds), len(struck)
    verdict.ends = [_shown(end) for end in ends]


def _shown(end: End) -> str:
    return end.error or end.outcome


def _performing(
    lab: Lab,
    farm: Farm,
    act: HostAct,
    actors: list[Actor],
    performed: list[str],
    people: list[Actor],
) -> Callable[[], None]:
    def take_back(tell: Tell) -> None:
        tell({"taken": farm.take_back(act.actor)})

    def perform() -> None:
        if act.kind == "release":
            # It waits for a holder, or for one that was suspended in a transaction.
            name = f"release of d{act.actor}"
            people.append(Actor(name, take_back, lab.folder / f"{name}.log"))
            return
        actor = actors[act.actor]
        if act.kind == "adb_kill":
            lab.kill_adb()
        elif actor.ended:
            return
        else:
            numbers = {
                "kill": signal.SIGKILL,
                "terminate": signal.SIGTERM,
                "suspend": signal.SIGSTOP,
            }
            actor.signal(numbers[act.kind])
        performed.append(act.kind)

    return perform


def _continuing(actor: Actor) -> Callable[[], None]:
    return lambda: actor.signal(signal.SIGCONT)


def _calm(farm: Farm) -> None:
    for number in range(DEVICES):
        farm.commands(number).clear()


def _struck(farm: Farm, at: float) -> list[str]:
    """The kinds of the faults that struck since then, once for each fault."""
    found: dict[tuple[int, str], str] = {}
    for number in range(DEVICES):
        for event in farm.commands(number).events():
            kind = event.fault.partition(":")[0]
            # What a shell cannot write is refused by the kernel, of which the device knows nothing.
            if event.at >= at and (event.kind == "struck" or (kind, event.kind) == _SQUEEZED):
                if kind == "runner":
                    kind += ":STOP" if "signal=STOP" in event.fault else ":KILL"
                found[number, event.fault] = kind
    return [*found.values()]
