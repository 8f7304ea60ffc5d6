"""The registry of workload types, and their JSON form, tagged by `kind`."""

from typing import Annotated

from pydantic import Field, TypeAdapter

from harness.workloads.bench import Bench
from harness.workloads.command import Command
from harness.workloads.dialog import Dialog
from harness.workloads.embed import Embed
from harness.workloads.evaluate import Evaluate
from harness.workloads.generate import Generate
from harness.workloads.perplexity import Perplexity
from harness.workloads.verify import Verify

AnyWorkload = Annotated[
    Bench | Perplexity | Verify | Generate | Dialog | Embed | Evaluate | Command,
    Field(discriminator="kind"),
]
"""Each kind of workload. Derive another from `Workload`, and add it here."""
_ADAPTER: TypeAdapter[AnyWorkload] = TypeAdapter(AnyWorkload)


def to_json(workload: AnyWorkload) -> str:
    """Write a workload as JSON."""
    return _ADAPTER.dump_json(workload).decode()


def from_json(text: str) -> AnyWorkload:
    """Read a workload from JSON.

    Raises:
        ValueError: it is not a workload of a known type.
    """
    return _ADAPTER.validate_json(text)
