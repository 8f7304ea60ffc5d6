"""A deployment of files, some of which the device may have already."""

import hashlib
import random
from dataclasses import dataclass
from pathlib import Path

from harness.deploy.deploy import deploy, remove_run
from harness.deploy.deployment import DeployFile
from harness.deploy.store import EvictionPolicy
from harness.devices.device import Device
from harness.pool.pool import Pool
from harness.pool.requirement import Requirement
from tests.chaos.actors import Actor, Tell
from tests.chaos.drawing import Case, pick
from tests.chaos.ends import End, end_of
from tests.chaos.lab import Farm, Lab, patient

_CONTENTS = 150
_DEPLOY_S = 15.0
_LEASE_S = 25.0


@dataclass(frozen=True, slots=True)
class Push:
    """What is deployed, and how.

    Attributes:
        contents: number of the content of each file by its name in the run folder.
        leased: whether the device is leased for it.
        prelude: what is done to the device's work root before: nothing, its scripts are gone,
            all of it is gone, or bits of its store have rotted.
    """

    contents: dict[str, int]
    executable: frozenset[str]
    leased: bool
    policy: EvictionPolicy
    prelude: str

    @classmethod
    def of(cls, case: Case) -> "Push":
        """That of a case."""
        chance = case.chance("push")
        names = [f"{'lib/' * chance.randrange(2)}f{n} $x'" for n in range(chance.randint(1, 10))]
        contents = {name: chance.randrange(_CONTENTS) for name in names}
        wanted = sum({number: size_of(number) for number in contents.values()}.values())
        roomy = EvictionPolicy(keep_free_bytes=1 << 20)
        tight = EvictionPolicy(1 << 20, wanted + (1 << 20))
        return cls(
            contents,
            frozenset(name for name in names if chance.random() < 0.3),
            chance.random() < 0.5,
            pick(chance, (roomy, tight), (2, 1)),
            pick(chance, ("nothing", "no scripts", "nothing there", "rot"), (6, 1, 1, 2)),
        )


def size_of(number: int) -> int:
    """Bytes of a content: a few are large, one is empty."""
    return 0 if number == 0 else 1 << (number * 7 % 22)


def local_file(lab: Lab, number: int) -> Path:
    """A content as a file of this host."""
    path = lab.folder / "contents" / str(number)
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(random.Random(number).randbytes(size_of(number)))  # noqa: S311
    return path


def files_of(lab: Lab, push: Push) -> dict[str, DeployFile]:
    """What `deploy` takes."""
    return {
        name: DeployFile(local_file(lab, number), name in push.executable)
        for name, number in push.contents.items()
    }


def prepare(lab: Lab, case: Case) -> None:
    """Do to the device what comes before the push."""
    push = Push.of(case)
    files_of(lab, push)
    root = lab.small.work_root(0)
    device = lab.small.device(0)
    match push.prelude:
        case "no scripts":
            device.shell(["rm", "-rf", f"{device.work_root}/scripts"])
        case "nothing there":
            device.shell(["rm", "-rf", device.work_root])
        case "rot":
            for number in sorted(set(push.contents.values()))[:3]:
                file = root / "store" / _sha256(local_file(lab, number))
                if file.exists() and (data := bytearray(file.read_bytes())):
                    data[len(data) // 2] ^= 1
                    file.write_bytes(data)
        case _:
            pass


def begin(lab: Lab, farm: Farm, case: Case) -> list[Actor]:
    """One process that deploys."""
    push = Push.of(case)

    def part(tell: Tell) -> None:
        if not push.leased:
            _deploy(lab, farm.device(0), push, case.name, tell)
            return
        with (
            Pool.open(farm.pool_file) as pool,
            pool.acquire(Requirement(name=farm.member(0)), timeout_s=patient(_LEASE_S)) as lease,
        ):
            _deploy(lab, lease.device, push, case.name, tell)

    return [Actor("deploy", part, lab.folder / f"{case.name}.log")]


def _deploy(lab: Lab, device: Device, push: Push, run_id: str, tell: Tell) -> None:
    done = deploy(
        device, files_of(lab, push), run_id=run_id, timeout_s=patient(_DEPLOY_S), policy=push.policy
    )
    tell({"pushed": done.pushed_bytes, "reused": done.reused_bytes})


def judge(
    lab: Lab, farm: Farm, case: Case, actors: list[Actor], struck: set[str]
) -> tuple[list[End], list[str]]:
    """What became of it; a run folder that is said to be there is looked at from this host."""
    end = end_of(actors[0])
    if end.outcome != "right":
        return [end], []
    push = Push.of(case)
    run = farm.work_root(0) / "runs" / case.name
    wrong = [
        reason
        for name, number in push.contents.items()
        if (reason := _compare(run / name, local_file(lab, number)))
    ]
    if "power" in struck:  # it may have gone after all was said and done
        wrong = [reason for reason in wrong if not reason.endswith("is empty")]
    said = actors[0].told[0]
    total = sum({number: size_of(number) for number in push.contents.values()}.values())
    if said["pushed"] + said["reused"] != total:
        wrong.append(f"it pushed {said['pushed']} and reused {said['reused']} bytes of {total}")
    return [End(end.who, "wrong", text="; ".join(wrong)) if wrong else end], []


def again(lab: Lab, device: Device, case: Case, tell: Tell) -> None:
    """The same deployment once more, now that nothing is in its way."""
    push = Push.of(case)
    run_id = f"{case.name}-again"
    deploy(device, files_of(lab, push), run_id=run_id, policy=EvictionPolicy(1 << 20))
    for name, number in push.contents.items():
        path = f"{device.work_root}/runs/{run_id}/{name}"
        found = device.shell(["sha256sum", path]).stdout.lstrip("\\")[:64]
        if found != _sha256(local_file(lab, number)):
            tell({"complaint": f"deployed again, {name} has SHA-256 {found}"})
    remove_run(device, run_id)


def _compare(there: Path, here: Path) -> str:
    try:
        size = there.stat().st_size
        if size == 0 < here.stat().st_size:
            return f"{there.name} is empty"
        return "" if _sha256(there) == _sha256(here) else f"{there.name} has another content"
    except OSError as error:
        return f"{there.name}: {error.strerror}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
