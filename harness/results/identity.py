"""Identity of what was measured: which runs may be averaged, and which may not.

Two runs are averaged only if everything listed here is equal. Above all, the emulator and hardware
never share a number, a table or a plot. The serial is not in the list: two phones of one kind are
two sessions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from harness.results.provenance import HOST_LIBRARIES
from harness.results.records import ContainerInfo, DeviceInfo, PerplexityDefinition, Run
from harness.words import pluralize

Pairs = tuple[tuple[str, str], ...]
UNKNOWN = "an unknown device"
_ON_HOST = frozenset({"python", "torch", "transformers", *HOST_LIBRARIES})
_LONGEST_VALUES = 78
SHORTEST_PROMPT = 2
"""Tokens of the shortest prompt, bos and one more: what is left of a prompt with `-p 0`."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A container on a kind of device, with the versions that matter.

    Attributes:
        host: the machine under an emulator, whose speed depends on it; empty for hardware.
    """

    emulator: bool
    model: str
    soc: str
    target: str
    container_sha256: str
    device: str
    abi: str | None
    host: str
    toolchain: str
    versions: Pairs
    qnnfarm_version: str

    @classmethod
    def of(cls, run: Run) -> "Subject":
        """Return the subject of a run."""
        source = run.provenance
        return cls(
            emulator=run.device.emulator,
            model=run.container.model,
            soc=run.device.soc,
            target=run.container.target,
            container_sha256=run.container.sha256,
            device=device_name(run),
            abi=run.device.abi,
            host=source.host if run.device.emulator else "",
            toolchain=source.toolchain,
            versions=_pairs(source.toolchain_versions) + _pairs(source.library_versions),
            qnnfarm_version=source.qnnfarm_version,
        )

    @property
    def place(self) -> str:
        """The SoC, or the kind of device where the SoC is unknown."""
        return self.soc or self.device or UNKNOWN

    @property
    def without_versions(self) -> "Subject":
        """The part that subjects must share to match."""
        return replace(self, versions=())

    def matches(self, other: "Subject") -> bool:
        """Return whether both are the same, as far as is known.

        Versions that only one of them knows are ignored.
        """
        mine, theirs = dict(self.versions), dict(other.versions)
        shared = mine.keys() & theirs.keys()
        return self.without_versions == other.without_versions and all(
            mine[name] == theirs[name] for name in shared
        )


@dataclass(frozen=True, slots=True)
class SpeedKey:
    """A subject and its workload: runs with equal keys measure the same speed.

    Attributes:
        at_once: whether other sessions ran on the host meanwhile; None if that is unknown.
        labels: the user's own.
    """

    subject: Subject
    kind: str
    runner: str
    prompt_tokens: int | None
    depth_tokens: int | None
    prompt: str | None
    max_new_tokens: int | None
    sampler: Pairs
    at_once: bool | None
    labels: Pairs

    @classmethod
    def of(cls, run: Run) -> "SpeedKey":
        """Return the key of a run."""
        work = run.workload
        return cls(
            subject=Subject.of(run),
            kind=run.kind,
            runner=work.runner,
            prompt_tokens=work.prompt_tokens,
            depth_tokens=work.depth_tokens or None,
            prompt=work.prompt_sha256 or work.prompt,
            max_new_tokens=work.max_new_tokens,
            sampler=_pairs(work.sampler),
            at_once=None if run.concurrent_sessions is None else run.concurrent_sessions > 1,
            labels=_pairs(run.labels),
        )

    @property
    def label(self) -> str:
        """The workload in llama-bench's words: prompt processing and text generation.

        A benchmark without more than the token that comes with the prompt is `pp64`, and one after
        the shortest prompt is `tg16`.
        """
        parts = []
        bench = self.kind == "bench"
        if self.prompt_tokens is not None and (self.measures_prompt or not bench):
            parts.append(f"pp{self.prompt_tokens}")
        if self.max_new_tokens is not None and (self.max_new_tokens > 1 or not bench):
            parts.append(f"tg{self.max_new_tokens}")
        label = "+".join(parts) + (f" @ d{self.depth_tokens}" if self.depth_tokens else "")
        return label if bench and label else f"{self.kind} {label}".strip()

    @property
    def measures_prompt(self) -> bool:
        """True where it is about its prompt, rather than a generation after the shortest one."""
        return self.prompt_tokens is None or self.prompt_tokens > SHORTEST_PROMPT


@dataclass(frozen=True, slots=True)
class PerplexityKey:
    """A subject, and the text and positions of a perplexity."""

    subject: Subject
    dataset_sha256: str | None
    definition: PerplexityDefinition | None

    @classmethod
    def of(cls, run: Run) -> "PerplexityKey":
        """Return the key of a run."""
        work = run.workload
        return cls(Subject.of(run), work.dataset_sha256, work.perplexity)

    @property
    def of_answers(self) -> bool:
        """True where it is of the model that answers, not of one that drafts for it."""
        definition = self.definition
        return definition is None or not definition.positions.startswith("draft_")


def find_differences(keys: Sequence[SpeedKey]) -> tuple[str, ...]:
    """Name the parts in which not all keys are equal."""
    found = [
        field.name.replace("_", " ")
        for parts in (keys, [key.subject for key in keys])
        for field in fields(parts[0])
        if field.name not in {"subject", "versions"}
        and len({getattr(part, field.name) for part in parts}) > 1
    ]
    versions = [frozenset(key.subject.versions) for key in keys]
    apart = frozenset[tuple[str, str]]().union(*versions) - versions[0].intersection(*versions)
    return (*found, *sorted({f"{name} version" for name, _ in apart}))


def container_name(container: ContainerInfo) -> str:
    """Name a container by its model and precision: `my-llama W4A16`."""
    return f"{container.model} {container.precision or ''}".rstrip()


def container_shape(container: ContainerInfo) -> str:
    """Describe the shapes of a container's graphs: `AR 1, 32, CL 192`; empty if unknown."""
    if not container.cl:
        return ""
    return f"AR {', '.join(map(str, container.ars))}, CL {container.cl}"


def describe_container(container: ContainerInfo) -> str:
    """Name a container with the shapes of its graphs: `my-llama W4A16, AR 1, 32, CL 192`."""
    return ", ".join(filter(None, (container_name(container), container_shape(container))))


def describe_scored(definition: PerplexityDefinition | None) -> str:
    """Describe how much text a perplexity is over: `8 windows, 1,280 tokens`."""
    if definition is None:
        return "an unknown number of windows"
    return f"{pluralize(definition.windows, 'window')}, {pluralize(definition.tokens, 'token')}"


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms that must be equal on both sides, or their numbers cannot be compared.

    The one rule of `compare`, `gate` and their like. A workload and the place where it runs belong
    to it; the containers are what is compared, but for their shapes and precision where those are
    to be the same.

    Attributes:
        device: its model with the version of its system.
        host: of an emulator, whose speed is the host's.
        tool: what measured it.
        libraries: on the device.
        concurrent: whether other sessions ran on the host at the same time.
        scored: text, windows and positions of a perplexity.
    """

    npu: str
    soc: str
    target: str
    workload: str
    prompt: str
    precision: str
    ars: str
    cl: int
    splits: int
    device: str
    host: str
    tool: str
    runner: str
    sampler: Pairs
    libraries: Pairs
    concurrent: bool
    scored: str

    @classmethod
    def of(cls, run: Run) -> "Terms":
        """Return the terms of a run."""
        container, work = run.container, run.workload
        key = SpeedKey.of(run)
        versions = run.provenance.library_versions
        scored = work.perplexity.model_dump() if work.perplexity else {}
        return cls(
            npu="the HTP emulator" if run.device.emulator else "hardware",
            soc=run.device.soc,
            target=container.target.partition(":")[0],
            workload=key.label,
            prompt=key.prompt or "",
            device=device_name(run),
            host=key.subject.host,
            tool=run.origin.tool if run.origin else "qnnfarm",
            runner=work.runner,
            sampler=key.sampler,
            libraries=_pairs({n: each for n, each in versions.items() if n not in _ON_HOST}),
            concurrent=(run.concurrent_sessions or 1) > 1,
            scored=" ".join((work.dataset_sha256 or "", _words(_pairs(scored)))).strip(),
            precision=container.precision or "",
            ars=", ".join(map(str, container.ars)),
            cl=container.cl,
            splits=container.n_splits,
        )

    def differences(self, other: "Terms") -> dict[str, tuple[str, str]]:
        """Return the terms in which both differ, with both values in words."""
        found = {
            field.name: (getattr(self, field.name), getattr(other, field.name))
            for field in fields(self)
        }
        return {
            name: (_words(mine), _words(theirs))
            for name, (mine, theirs) in found.items()
            if mine != theirs
        }


TERMS = tuple(field.name for field in fields(Terms))
_OF_ONE_SIDE = frozenset({"precision", "ars", "cl", "splits", "concurrent", "scored"})
"""Terms in which the containers of a comparison may differ, and what they ran beside."""
_LABELS = {"npu": "device", "device": "device model", "tool": "measured by", "target": "target SoC"}


def find_incomparable(a: Run, b: Run) -> tuple[str, ...]:
    """Name what two runs must share for a comparison of their containers, and do not.

    Each key comes with both values where they are short: `soc (SM8750 against SM8650)`. The
    containers may differ, as they are what is compared; their target's SoC may not. Libraries that
    only one of them knows are ignored.
    """
    mine, theirs = Terms.of(a), Terms.of(b)
    found = {
        _LABELS.get(name, name): values
        for name, values in mine.differences(theirs).items()
        if name not in {*_OF_ONE_SIDE, "libraries"}
    }
    known, others = dict(mine.libraries), dict(theirs.libraries)
    found |= {
        name: (known[name], others[name])
        for name in sorted(known.keys() & others.keys())
        if known[name] != others[name]
    }
    return tuple(
        with_values(name, f"{one or 'none'} against {other or 'none'}")
        for name, (one, other) in found.items()
    )


def with_values(name: str, values: str) -> str:
    """Append values to a name where they are short."""
    return f"{name} ({values})" if len(values) < _LONGEST_VALUES else name


def _words(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"{name} {each}" for name, each in value)
    return str(value)


def place(run: Run) -> str:
    """Name the SoC of a run, or what else is known of its device."""
    return Subject.of(run).place


def device_name(run: Run) -> str:
    """Name the kind of device: maker, model and Android version, as far as known."""
    device = run.device
    android = f"Android {device.android_version}" if device.android_version else None
    maker, model = device.manufacturer or "", device.model or ""
    name = model if model.lower().startswith(maker.lower()) else f"{maker} {model}"
    return ", ".join(part for part in (name.strip(), android) if part)


def describe_clocks(device: DeviceInfo) -> tuple[tuple[str, str], ...]:
    """Describe the limits of each processor clock: `CPU 7`, `3.53 GHz, at most 4.32 GHz`."""
    limits: dict[str, dict[str, float]] = {}
    for name, hertz in device.clocks.items():
        kind, _, cpu = name.partition(":")
        limits.setdefault(cpu, {})[kind] = hertz
    found = []
    for cpu, each in sorted(limits.items(), key=lambda one: (len(one[0]), one[0])):
        allowed, most = each.get("cpu_cap_hz"), each.get("cpu_max_hz")
        words = [f"{allowed / 1e9:.2f} GHz"] if allowed is not None else []
        words += [f"at most {most / 1e9:.2f} GHz"] if most is not None and most != allowed else []
        found.append((f"CPU {cpu}", ", ".join(words)))
    return tuple(pair for pair in found if pair[1])


def _pairs(mapping: Mapping[str, object]) -> Pairs:
    return tuple(sorted((key, str(value)) for key, value in mapping.items()))
