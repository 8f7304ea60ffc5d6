"""What was done, or found, before a measured run."""

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["met", "not-met", "unavailable", "restored", "not-restored"]


@dataclass(frozen=True, slots=True)
class ConditionRecord:
    """One condition of a run; `dataclasses.asdict` gives JSON scalars.

    Attributes:
        name: `thermal_gate`, `charge`, `battery_health`, `wake_lock`, `stay_awake`, `screen`,
            `fixed_performance`, `governor`.
        outcome: `unavailable` where the device has no way to bring it about, or to tell.
        reason: in words, where the outcome does not say it all.
        waited_s: how long it took to come about.
        before: what was found: a temperature in degrees Celsius, a level in percent, a setting.
        after: what it was at the end.
    """

    name: str
    outcome: Outcome
    reason: str = ""
    waited_s: float = 0.0
    before: str | float | None = None
    after: str | float | None = None
