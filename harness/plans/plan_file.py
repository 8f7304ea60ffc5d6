"""`PLAN.yaml`: workloads and their devices, checked before anything runs (docs/plans.md)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

from buildlib.toolchains.registry import ToolchainName
from harness.devices.spec import check_type_name
from harness.errors import FailureClass, WrongUseError
from harness.pool.config import ReceiverConfig
from harness.results.records import MAX_LABELS
from harness.runtimes.base import LogLevel
from harness.runtimes.registry import DEFAULT_RUNTIME, check_runtime
from harness.telemetry.charge import ChargeWindow
from harness.telemetry.conditions import Conditions
from harness.workloads.base import NonEmpty
from harness.workloads.registry import AnyWorkload
from harness.yaml_files import YamlFile

Label = Annotated[str, Field(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._+-]{0,63}\Z")]
LabelValue = Annotated[str, Field(pattern=r"\A[^\x00-\x1f\x7f]{1,200}\Z")]
Word = Annotated[str, Field(min_length=1, max_length=128, pattern=r"\A[^\x00-\x20\x7f]+\Z")]
Seconds = Annotated[float, Field(gt=0, le=30 * 86400, allow_inf_nan=False)]
_LOST_LEASES = 10
"""Nobody takes one cell's device away more often, unless the cell itself removes our work root."""
Sessions = Annotated[int, Field(ge=1, le=1000)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, regex_engine="python-re")


Lengths = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1, strict=False)]


def _several(value: object) -> object:
    return [value] if isinstance(value, int) else value


class BuildEntry(_Part):
    """Build of a container by `qnnfarm nightly`: the options of `qnnfarm build`.

    Attributes:
        model: an ONNX export, or the folder of a checkpoint.
        options: any options of the builder by their dotted keys, or in sections.
        verify: run the model before and after each stage, and refuse stages that changed it.
        toolchain: compiler.
        qairt_sdk: folder of the SDK.
    """

    model: NonEmpty
    target: NonEmpty
    ar: Annotated[Lengths, BeforeValidator(_several)] | None = None
    cl: Annotated[Lengths, BeforeValidator(_several)] | None = None
    splits: Annotated[int, Field(ge=1)] | None = None
    recipe: NonEmpty | None = None
    max_kl: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    encodings: NonEmpty | None = None
    calibration: NonEmpty | None = None
    lora: NonEmpty | None = None
    embedding_lut: bool | None = None
    options: Mapping[str, object] = Field(default_factory=dict)
    verify: bool = False
    toolchain: ToolchainName = "pypi"
    qairt_sdk: NonEmpty | None = None


class ContainerEntry(_Part):
    """A container of the matrix; without a label, its folder's name is the label."""

    path: NonEmpty
    label: Label | None = None
    build: BuildEntry | None = None


class DeviceSelector(_Part):
    """Requirements of the devices that cells run on.

    Attributes:
        count: number of different devices that each cell runs on; `all`: every one of the pool.
    """

    label: Label | None = None
    soc: Word | None = None
    hexagon: Word | None = None
    type: Annotated[str, AfterValidator(check_type_name)] | None = None
    name: Word | None = None
    tags: tuple[Word, ...] = Field((), strict=False)
    min_free_bytes: Annotated[int, Field(ge=0)] = 0
    count: Annotated[int, Field(ge=1, le=10_000)] | Literal["all"] = 1


class WorkloadEntry(_Part):
    """A workload of the matrix; in the file, its own keys stand beside these two.

    Attributes:
        label: defaults to the kind.
        sessions: number of sessions in which it runs.
    """

    label: Label | None = None
    sessions: Sessions = 1
    workload: AnyWorkload

    @model_validator(mode="before")
    @classmethod
    def _split(cls, keys: object) -> object:
        if not isinstance(keys, dict):
            return keys
        own = {key: keys[key] for key in ("label", "sessions") if key in keys}
        return {**own, "workload": {key: v for key, v in keys.items() if key not in own}}


class Retries(_Part):
    """Retries of a cell, counted separately by the class of failure.

    Attributes:
        device: the device or the way to it failed; retried on another device if there is one.
        runner: the program on the device crashed or hung.
        output: the answer is wrong, or a command failed.
    """

    device: Annotated[int, Field(ge=0, le=100)] = 2
    runner: Annotated[int, Field(ge=0, le=100)] = 1
    output: Annotated[int, Field(ge=0, le=100)] = 0

    def of(self, failure: FailureClass) -> int:
        """Return the number of retries after failures of a class."""
        if failure is FailureClass.LEASE:
            return _LOST_LEASES
        return 0 if failure is FailureClass.USE else int(getattr(self, failure.value))


class Timeouts(_Part):
    """Timeouts in seconds.

    Attributes:
        cell_s: for one try of one cell.
        runner_s: for an answer, a window or a text on the device; as `--timeout` of commands.
        lease_s: for cells to wait while no device at all is free for them.
    """

    cell_s: Seconds = 3600.0
    runner_s: Seconds | None = None
    lease_s: Seconds = 3600.0


class ChargeEntry(_Part):
    """See `ChargeWindow`."""

    min_percent: float = 0.0
    max_percent: float = 100.0
    charging: bool | None = None
    max_wait_s: float = 0.0


class ConditionsEntry(_Part):
    """See `Conditions`; the defaults are those of `qnnfarm bench`."""

    max_temp_c: float | None = 45.0
    stable_s: float | None = 20.0
    stable_c: float = 0.5
    max_wait_s: float = 180.0
    zones: Annotated[tuple[NonEmpty, ...], Field(strict=False)] = ("*",)
    charge: ChargeEntry | None = None
    wake_lock: bool = True
    screen_off: bool = True
    fixed_performance: bool = False
    governor: str | None = None
    policy: Literal["fail", "continue"] = "continue"

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        try:
            self.conditions()
        except WrongUseError as error:
            raise ValueError(str(error)) from None
        return self

    def conditions(self) -> Conditions:
        """Convert it for telemetry."""
        plain = {name: getattr(self, name) for name in type(self).model_fields if name != "charge"}
        charge = None if self.charge is None else ChargeWindow(**dict(self.charge))
        return Conditions(**plain, charge=charge)


class NightlyEntry(_Part):
    """Work of `qnnfarm nightly` besides running the plan.

    Attributes:
        reports: folder of the reports; by default the plan's name with `-reports`.
        keep: number of nights with reports.
        url: where people reach that folder, for links in messages.
        tell: receivers of its messages.
        when: `news` tells of changes since the night before; `always` tells of each night.
    """

    reports: NonEmpty | None = None
    keep: Annotated[int, Field(ge=1, le=10_000)] = 30
    url: Annotated[str, Field(pattern=r"\Ahttps?://[^\s\x00-\x1f\x7f]+\Z")] | None = None
    tell: Annotated[tuple[ReceiverConfig, ...], Field(max_length=20, strict=False)] = ()
    when: Literal["news", "always"] = "news"


class Match(_Part):
    """Combinations, by the labels of their parts; a part that is left out matches all."""

    container: str | None = None
    runtime: str | None = None
    device: str | None = None
    workload: str | None = None

    @model_validator(mode="after")
    def _names_something(self) -> Self:
        if not (self.container or self.runtime or self.device or self.workload):
            raise ValueError("name a container, a runtime, a device or a workload by its label")
        return self

    def matches(self, container: str, runtime: str, device: str, workload: str) -> bool:
        """Return whether a combination matches."""
        own = (self.container, self.runtime, self.device, self.workload)
        labels = (container, runtime, device, workload)
        return all(one is None or one == label for one, label in zip(own, labels, strict=True))


class Plan(_Part):
    """A plan. Paths in it are relative to its folder.

    Attributes:
        runtimes: names of the runtimes; each runs the containers that it can.
        conditions: that benchmarks wait for; `none` measures devices as they are.
        telemetry: whether devices are sampled while they generate.
        labels: the user's own keys and values, which every run of the plan is stored with.
        log_level: of the library's own log; by default its errors.
        trace: whether runs are kept with a trace.
        push: files that are pushed with every container, as `pushed_files` has them.
        nightly: further work of `qnnfarm nightly`; `qnnfarm run` ignores it.
    """

    name: Label
    db: NonEmpty | None = None
    pool: NonEmpty | None = None
    containers: tuple[ContainerEntry, ...] = Field((), strict=False)
    runtimes: Annotated[
        tuple[Annotated[str, AfterValidator(check_runtime)], ...], Field(min_length=1, strict=False)
    ] = (DEFAULT_RUNTIME,)
    devices: Annotated[tuple[DeviceSelector, ...], Field(min_length=1, strict=False)] = (
        DeviceSelector(tags=()),
    )
    workloads: Annotated[tuple[WorkloadEntry, ...], Field(min_length=1, strict=False)]
    exclude: tuple[Match, ...] = Field((), strict=False)
    include: tuple[Match, ...] = Field((), strict=False)
    retries: Retries = Retries()
    timeouts: Timeouts = Timeouts()
    conditions: ConditionsEntry | Literal["none"] = ConditionsEntry()
    telemetry: bool = True
    labels: Annotated[Mapping[Label, LabelValue], Field(max_length=MAX_LABELS)] = Field(
        default_factory=dict
    )
    log_level: LogLevel | None = None
    trace: bool = False
    push: Annotated[tuple[NonEmpty, ...], Field(strict=False)] = ()
    nightly: NightlyEntry = NightlyEntry()


def load_plan(path: Path) -> Plan:
    """Read and check a plan; a `ConfigFileError` names the line, the key, and the fault."""
    return YamlFile.load(path, Plan).content
