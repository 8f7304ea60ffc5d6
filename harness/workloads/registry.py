"""The types of workloads, those of plugins too, and their JSON form, tagged by `kind`."""

from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidatorFunctionWrapHandler, WrapValidator
from pydantic.functional_serializers import PlainSerializer
from pydantic_core import PydanticKnownError

from buildlib.entry_points import entry_names, load_entry
from buildlib.errors import BuildError
from harness.workloads.base import Workload
from harness.workloads.bench import Bench
from harness.workloads.command import Command
from harness.workloads.dialog import Dialog
from harness.workloads.generate import Generate
from harness.workloads.perplexity import Perplexity
from harness.workloads.verify import Verify

DOOR = "workloads"
_KINDS = frozenset({"bench", "perplexity", "verify", "generate", "dialog", "command"})


def find_workload(kind: str) -> type[Workload] | None:
    """Return the type of workload that a plugin has for a kind: `qnnfarm.workloads`."""
    found: type[Workload] | None = load_entry(DOOR, kind)
    return found


def _read(value: object, ours: ValidatorFunctionWrapHandler) -> Any:  # noqa: ANN401 - a workload
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    if not isinstance(kind, str) or kind in _KINDS:
        return ours(value)
    try:
        plugin = find_workload(kind)
    except BuildError as error:  # a workload that cannot be loaded here is none that can be read
        raise ValueError(str(error)) from error
    if plugin is None:
        kinds = ", ".join(map(repr, sorted({*_KINDS, *entry_names(DOOR)})))
        context = {"discriminator": "kind", "tag": kind, "expected_tags": kinds}
        raise PydanticKnownError("union_tag_invalid", context)
    return plugin.model_validate(value)


AnyWorkload = Annotated[
    Bench | Perplexity | Verify | Generate | Dialog | Command,
    Field(discriminator="kind"),
    WrapValidator(_read),
    PlainSerializer(lambda workload: workload.model_dump(mode="json"), when_used="json"),
]
"""Each kind of workload. Derive another from `Workload`: it is a plugin's, by its kind."""
_ADAPTER: TypeAdapter[AnyWorkload] = TypeAdapter(AnyWorkload)


def to_json(workload: Workload) -> str:
    """Write a workload as JSON."""
    return _ADAPTER.dump_json(workload).decode()  # type: ignore[arg-type] # or a plugin's


def from_json(text: str) -> AnyWorkload:
    """Read a workload from JSON.

    Raises:
        ValueError: it is not a workload of a known type.
    """
    return _ADAPTER.validate_json(text)
