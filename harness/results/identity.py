"""Identity of a measurement: the meaning of "the same test" to a person.

A `Subject` is a model in a precision, a workload, a kind of device, and the user's labels, as one
tool measures them. Everything else about a run is one of its `facts`: the container's hash, the
settings, the versions, the phone's build. They may change from night to night; a change of speed
names those that changed with it. Emulator and hardware are never the same subject. Serials are
neither: two phones of one kind are two sessions.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from harness.results.perplexity import describe_scored
from harness.results.provenance import HOST_LIBRARIES
from harness.results.records import (
    GENIE,
    RUNTIME,
    SIDES,
    ContainerInfo,
    DeviceInfo,
    PerplexityDefinition,
    Run,
)
from harness.words import HOST_CPU, stand_in

Pairs = tuple[tuple[str, str], ...]
UNKNOWN = "an unknown device"
OURS = "qnnfarm"
"""The tool of all runs that were not imported."""
_ON_HOST = frozenset({"python", "torch", "transformers", *HOST_LIBRARIES})
_LONGEST_VALUES = 78
SHORTEST_PROMPT = 2
"""Tokens of the shortest prompt, bos and one more: what is left of a prompt with `-p 0`."""
OF_DEVICE = frozenset({"Android", "build"})
"""Names of facts in which the phones of one subject may differ on one night."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A container, a workload and a kind of device, as a person tells them from others.

    Attributes:
        host: the machine under an emulator, whose speed depends on it; empty for hardware.
        device: maker and model.
        tool: that measured it.
        container: the container's label in a plan or a comparison; where it has none, the shapes of
            its graphs.
        runtime: on the device; empty for imported runs.
        adapter: the LoRA adapter that is applied.
        prompt: text or hash, where it decides the result: not of a benchmark.
        text: hash of the text of a perplexity.
        scored: positions and windows of a perplexity.
        labels: the user's own.
    """

    emulator: bool
    host: str
    soc: str
    device: str
    target: str
    tool: str
    model: str
    precision: str
    container: str
    runtime: str
    adapter: str
    kind: str
    prompt_tokens: int | None
    depth_tokens: int | None
    max_new_tokens: int | None
    prompt: str
    text: str
    scored: PerplexityDefinition | None
    labels: Pairs

    @classmethod
    def of(cls, run: Run) -> "Subject":
        """Return the subject of a run."""
        container, work = run.container, run.workload
        return cls(
            emulator=run.device.emulator,
            host=run.provenance.host if run.device.emulator else "",
            soc=run.device.soc,
            device=_maker_and_model(run.device),
            target=container.target,
            tool=run.origin.tool if run.origin else OURS,
            model=container.model,
            precision=container.precision or "",
            container=container_label(run.label) or container_shape(container),
            runtime="" if run.origin else work.runtime,
            adapter=str(work.sampler.get("lora") or ""),
            kind=run.kind,
            prompt_tokens=work.prompt_tokens,
            depth_tokens=work.depth_tokens or None,
            max_new_tokens=work.max_new_tokens,
            prompt="" if run.kind == "bench" else work.prompt_sha256 or work.prompt or "",
            text=work.dataset_sha256 or "",
            scored=work.perplexity,
            labels=_pairs(run.labels),
        )

    @property
    def id(self) -> str:
        """Short and stable; a new field changes the ids of all subjects that have it."""
        values = {**asdict(self), "scored": self.scored and self.scored.model_dump()}
        if not self.by:
            del values["runtime"]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def is_imported(self) -> bool:
        """True where another tool measured it."""
        return self.tool != OURS

    @property
    def by(self) -> str:
        """The runtime where it does not go without saying, as Genie and other tools' do."""
        return "" if self.runtime == GENIE else self.runtime

    @property
    def place(self) -> str:
        """The SoC, or the kind of device where the SoC is unknown."""
        return self.soc or self.device or UNKNOWN

    @property
    def where(self) -> str:
        """The container's target, or the place of what another tool measured."""
        return self.target or self.place

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

    @property
    def of_answers(self) -> bool:
        """True unless it is the perplexity of a model that drafts for the one that answers."""
        return self.scored is None or not self.scored.positions.startswith("draft_")

    @property
    def without_test(self) -> "Subject":
        """The container on its device, without the test."""
        return replace(self, **_UNTESTED)

    def without(self, names: Collection[str]) -> "Subject":
        """Return the subject without the values of some fields."""
        blank: dict[str, Any] = dict.fromkeys(names)
        return replace(self, **blank)

    def differences(self, other: "Subject") -> dict[str, tuple[str, str]]:
        """Return the fields in which both differ, with both values in words."""
        mine, theirs = _in_words(self), _in_words(other)
        return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}


_TEST = ("prompt_tokens", "depth_tokens", "max_new_tokens")
_UNTESTED: Mapping[str, Any] = {
    **dict.fromkeys(_TEST), "kind": "", "prompt": "", "text": "", "scored": None, "labels": ()
}  # fmt: skip

_STAND_INS = {HOST_CPU: HOST_CPU, "emulator": "HTP emulator"}


def _in_words(subject: Subject) -> dict[str, str]:
    words = {
        field.name: str(getattr(subject, field.name) or "")
        for field in fields(subject)
        if field.name not in {"emulator", "kind", "scored", "text", "labels", *_TEST}
    }
    scored = f"{describe_scored(subject.scored)} of {subject.text[:12]}" if subject.scored else ""
    return {
        "npu": f"the {_STAND_INS[stand_in(subject.runtime)]}" if subject.emulator else "hardware",
        **words,
        "workload": subject.label,
        "scored": scored,
        "labels": ", ".join(f"{name}={value}" for name, value in subject.labels),
    }


def facts(run: Run) -> dict[str, str]:
    """Return the facts of a run beside its subject, in words by name.

    These may change from night to night: the container's hash and shapes, the settings, the
    versions of libraries, the phone's system.
    """
    source, container, work = run.provenance, run.container, run.workload
    values = {
        **{name: "none" if value is None else str(value) for name, value in work.sampler.items()},
        "container": container.sha256[:12],
        "shapes": container_shape(container),
        "parts": str(container.n_splits or ""),
        RUNTIME: "" if run.origin else work.runtime,
        "runner": work.runner,
        "prompt": (work.prompt_sha256 or _digest(work.prompt or ""))[:12],
        "sessions at once": "several" if (run.concurrent_sessions or 1) > 1 else "one",
        "Android": run.device.android_version,
        "build": run.device.build_fingerprint,
        "qnnfarm": source.qnnfarm_version,
        **source.toolchain_versions,
        **source.library_versions,
    }
    return {name: value for name, value in values.items() if value}


def describe_changes(
    before: Iterable[Run], after: Iterable[Run], *, ignored: Collection[str] = ()
) -> tuple[str, ...]:
    """Say in which facts no run of one side is as one of the other: `genie 1.21 → 1.22`.

    Facts that only one side knows are left out, but for settings: there, absent is a value.
    """
    was, now = _values(before), _values(after)
    both = was.keys() & now.keys()
    settings = {name for name, (_, is_setting) in (was | now).items() if is_setting}
    names = sorted((both | settings) - set(ignored))
    changes = [(name, was.get(name, _ABSENT)[0], now.get(name, _ABSENT)[0]) for name in names]
    return tuple(
        f"{name} {', '.join(sorted(old))} → {', '.join(sorted(new))}"
        for name, old, new in changes
        if old.isdisjoint(new)
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest() if text else ""


_ABSENT = ({"none"}, True)


def _values(runs: Iterable[Run]) -> dict[str, tuple[set[str], bool]]:
    """Return the values of each fact, and whether it is a setting."""
    values: dict[str, tuple[set[str], bool]] = {}
    for run in runs:
        for name, value in facts(run).items():
            values.setdefault(name, (set(), name in run.workload.sampler))[0].add(value)
    return values


def container_label(label: str) -> str:
    """Return a container's label: that of a side of a comparison, or of a plan's cell."""
    container, _, rest = label.partition("/")
    return container if rest or label in SIDES else ""


def container_name(container: ContainerInfo) -> str:
    """Name a container by its model and precision: `my-llama W4A16`."""
    return f"{container.model} {container.precision or ''}".rstrip()


def container_shape(container: ContainerInfo) -> str:
    """Describe the shapes of a container's graphs: `AR 1, 32, CL 192`; empty if unknown."""
    ars = f"AR {', '.join(map(str, container.ars))}" if container.ars else ""
    return ", ".join(filter(None, (ars, f"CL {container.cl}" if container.cl else "")))


def describe_container(container: ContainerInfo) -> str:
    """Name a container with the shapes of its graphs: `my-llama W4A16, AR 1, 32, CL 192`."""
    return ", ".join(filter(None, (container_name(container), container_shape(container))))


_OF_CONTAINER = frozenset({"model", "precision", "container", "scored", "labels"})
_LABELS = {"npu": "device", "device": "device model", "tool": "measured by", "target": "target SoC"}


def find_incomparable(a: Run, b: Run) -> tuple[str, ...]:
    """Name the differences that keep the containers of two runs from being compared.

    Each comes with both values where they are short: `soc (SM8750 against SM8650)`. The containers
    may differ, as they are compared; their target's SoC may not. Libraries that only one of
    them knows are ignored, and so are those of the host.
    """
    mine, theirs = Subject.of(a), Subject.of(b)
    one, other = (replace(each, target=each.target.partition(":")[0]) for each in (mine, theirs))
    differences = {
        _LABELS.get(name, name): values
        for name, values in one.differences(other).items()
        if name not in _OF_CONTAINER
    }
    versions, others = a.provenance.library_versions, b.provenance.library_versions
    on_device = (versions.keys() & others.keys()) - _ON_HOST
    terms = [_terms(run, on_device) for run in (a, b)]
    for name in sorted(terms[0].keys() | terms[1].keys()):
        values = terms[0].get(name, ""), terms[1].get(name, "")
        if values[0] != values[1]:
            differences[name] = values
    return tuple(
        with_values(name, f"{one or 'none'} against {other or 'none'}")
        for name, (one, other) in differences.items()
    )


def _terms(run: Run, libraries: Collection[str]) -> dict[str, str]:
    names = {"runner", "prompt", "Android", *run.workload.sampler, *libraries}
    return {name: value for name, value in facts(run).items() if name in names}


def with_values(name: str, values: str) -> str:
    """Append values to a name where they are short."""
    return f"{name} ({values})" if len(values) < _LONGEST_VALUES else name


def place(run: Run) -> str:
    """Name the SoC of a run, or else its device."""
    return Subject.of(run).place


def device_name(run: Run) -> str:
    """Name the kind of device: maker, model and Android version, as far as known."""
    version = run.device.android_version
    android = f"Android {version}" if version else ""
    return ", ".join(filter(None, (_maker_and_model(run.device), android)))


def _maker_and_model(device: DeviceInfo) -> str:
    maker, model = device.manufacturer or "", device.model or ""
    name = model if model.lower().startswith(maker.lower()) else f"{maker} {model}"
    return name.strip()


def describe_clocks(device: DeviceInfo) -> tuple[tuple[str, str], ...]:
    """Describe the limits of each processor clock: `CPU 7`, `3.53 GHz, at most 4.32 GHz`."""
    limits: dict[str, dict[str, float]] = {}
    for name, hertz in device.clocks.items():
        kind, _, cpu = name.partition(":")
        limits.setdefault(cpu, {})[kind] = hertz
    clocks = []
    for cpu, each in sorted(limits.items(), key=lambda one: (len(one[0]), one[0])):
        limit, most = each.get("cpu_cap_hz"), each.get("cpu_max_hz")
        words = [f"{limit / 1e9:.2f} GHz"] if limit is not None else []
        words += [f"at most {most / 1e9:.2f} GHz"] if most is not None and most != limit else []
        clocks.append((f"CPU {cpu}", ", ".join(words)))
    return tuple(pair for pair in clocks if pair[1])


def _pairs(mapping: Mapping[str, object]) -> Pairs:
    return tuple(sorted((key, str(value)) for key, value in mapping.items()))
