"""Result of `bisect_pipeline`: the ranking, and the proposals in turn with their checks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from buildlib.cache.sizes import size_text
from buildlib.numerics.divergence import Divergence
from buildlib.quantize.mixed_precision.proposal import Proposal, QualityBound
from buildlib.quantize.mixed_precision.sensitivity import Sensitivity, UnitCost
from harness.console import Row, answers, print_remark, print_rows
from harness.pipeline.comparison import quality_cells
from harness.words import pluralize

_HEADINGS = ("tensor", "KL alone", "SQNR", "layer's SQNR", "bits", "KL without")
_CHECK_HEADINGS = ("model", "runs on", "windows", "perplexity", "from float", "KL", "top-1")


@dataclass(frozen=True)
class Check:
    """Quality of a model over the windows that chose a mixture, or over held-out ones."""

    where: Literal["CPU", "HTP emulator"]
    windows: Literal["choosing", "held out"]
    found: Divergence


@dataclass(frozen=True)
class Try:
    """A proposal, and how it did, the last of the checks being that which decides."""

    proposal: Proposal
    checks: tuple[Check, ...]


@dataclass(frozen=True)
class Bisection:
    """Result of a search.

    Attributes:
        windows: pieces of text that ranked and chose.
        held_out: other pieces, that checked; 0 without a bound.
        quantized: checks of the model that was ranked.
        tries: proposals in turn, the last of which is the result; none without a bound.
        out: folder of its model.
        build_command: that makes a container of it.
        container: check of the container that was given.
    """

    sensitivity: Sensitivity
    windows: int
    bound: QualityBound | None = None
    held_out: int = 0
    quantized: tuple[Check, ...] = ()
    tries: tuple[Try, ...] = ()
    out: Path | None = None
    build_command: str = ""
    container: Check | None = None

    @property
    def proposal(self) -> Proposal | None:
        """The last proposal; None without a bound."""
        return self.tries[-1].proposal if self.tries else None

    @property
    def checked(self) -> Divergence | None:
        """The built proposal on the emulator over held-out text; None if it was not built."""
        last = self.tries[-1].checks[-1] if self.tries else None
        return last.found if last is not None and last.where == "HTP emulator" else None

    @property
    def met(self) -> bool:
        """True if the bound holds wherever the last proposal was measured; true without a bound."""
        if self.bound is None or not self.tries:
            return True
        held_out = (check.found for check in self.tries[-1].checks if check.windows == "held out")
        return self.tries[-1].proposal.met and all(map(self.bound.holds, held_out))

    @property
    def mixed_precision(self) -> list[str]:
        """The proposal as `quantization.mixed_precision` takes it: `NAME=BITS`."""
        return as_option(self.proposal)

    def print(self, top: int | None = 20) -> None:
        """Print the ranking, the checks and the proposal."""
        costs = self.sensitivity.costs
        rows = [Row(_cells(cost)) for cost in costs[:top]]
        both = any(cost.rest is not None for cost in costs)
        headings = _HEADINGS if both else _HEADINGS[:-1]
        print_rows(
            headings, [Row(row.cells[: len(headings)]) for row in rows], right=set(headings[1:])
        )
        if len(rows) < len(costs):
            answers().print(f"and {len(costs) - len(rows)} that cost less")
        quantized = self.quantized or (Check("CPU", "choosing", self.sensitivity.whole),)
        checks = [("container", self.container)] if self.container is not None else []
        checks += [("quantized", check) for check in quantized]
        checks += [(_name(one.proposal), check) for one in self.tries for check in one.checks]
        self._print_checks(checks)
        if self.proposal is not None:
            self._print_proposal(self.proposal)

    def _print_checks(self, checks: Sequence[tuple[str, Check]]) -> None:
        answers().print()
        rows = [
            Row([
                name,
                check.where,
                check.windows,
                *quality_cells(check.found),
            ])
            for name, check in checks
        ]  # fmt: skip
        print_rows(_CHECK_HEADINGS, rows, right=set(_CHECK_HEADINGS[3:]))
        tokens = pluralize(self.sensitivity.whole.steps, "token")
        told = f"{tokens} in {pluralize(self.windows, 'window')} to rank"
        if self.held_out:
            told += f" and choose on, {self.held_out} held out to check on"
        print_remark(told)

    def _print_proposal(self, proposal: Proposal) -> None:
        console = answers()
        console.print()
        if proposal.raised:
            more = f"{_name(proposal)}, {size_text(proposal.bytes_more)} more"
        else:
            more = "no weight needs more bits" if self.met else "no weight can get more bits"
        console.print(f"{self.bound}: {more}: {self._outcome(proposal)}")
        if proposal.raised:
            console.print("quantization.mixed_precision:")
            for text in self.mixed_precision:
                console.print(f"  - {text}")
        if self.out is not None:
            console.print(f"{self.out}: its model; `{self.build_command}` builds it")

    def _outcome(self, proposal: Proposal) -> str:
        """Say whether the bound is met, and what ended the search if not."""
        last = self.tries[-1].checks[-1]
        where = f"on {'the HTP emulator' if self.checked is not None else 'the CPU'}"
        if self.met:
            return f"met {where}" + ("" if self.checked is not None else ", not built")
        if not proposal.met:
            return "not met with more bits for all that can get them: give a looser --bound"
        bound = proposal.bound
        text = f"not met: {bound.show(last.found)} {where}"
        if last.where == "HTP emulator":
            cpu = next(c.found for c in self.tries[-1].checks[::-1] if c.where == "CPU")
            text += f", though {bound.show(cpu)} on the CPU,"
        text += f" over held-out text after {pluralize(len(self.tries), 'proposal')}"
        able = sum(c.unit.kind == "weight" and bool(c.unit.high) for c in self.sensitivity.costs)
        advice = "allow more --tries, or " if len(proposal.raised) < able else ""
        return f"{text}: {advice}give a looser --bound"

    def as_document(self) -> dict[str, object]:
        """Return the result as JSON can hold it; SQNRs that are infinite are null."""
        proposal = self.proposal
        return {
            "windows": self.windows,
            "held_out_windows": self.held_out,
            "positions": self.sensitivity.whole.steps,
            "granularity": self.sensitivity.granularity,
            "whole": self.sensitivity.whole.metrics,
            "costs": [_cost_document(cost) for cost in self.sensitivity.costs],
            "container": None if self.container is None else _check_document(self.container),
            "quantized": [_check_document(check) for check in self.quantized],
            "tries": [_try_document(one) for one in self.tries],
            "proposal": None
            if proposal is None
            else {
                "bound": str(self.bound),
                "met": proposal.met,
                "measurements": proposal.measurements,
                "bytes_more": proposal.bytes_more,
                "mixed_precision": self.mixed_precision,
                "before": proposal.before.metrics,
                "after": proposal.after.metrics,
            },
            "emulator": None if self.checked is None else self.checked.metrics,
            "out": None if self.out is None else str(self.out),
            "met": self.met,
        }


def as_option(proposal: Proposal | None) -> list[str]:
    """Return a proposal as `quantization.mixed_precision` takes it."""
    bits = {} if proposal is None else proposal.bits
    return [f"{name}={number}" for name, number in sorted(bits.items())]


def _cells(cost: UnitCost) -> list[str]:
    rest = "-" if cost.rest is None else f"{cost.rest.kl:.5f}"
    sqnr, output = (_decibels(value) for value in (cost.sqnr_db, cost.output_sqnr_db))
    return [cost.unit.name, f"{cost.alone.kl:.5f}", sqnr, output, str(cost.unit.bits), rest]


def _decibels(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.1f} dB"


def _name(proposal: Proposal) -> str:
    weights = pluralize(len(proposal.bits), "weight")
    return f"{weights} at 8 bits" if proposal.raised else "as it is"


def _check_document(check: Check) -> dict[str, object]:
    return {"runs_on": check.where, "windows": check.windows, **check.found.metrics}


def _try_document(one: Try) -> dict[str, object]:
    checks = [_check_document(check) for check in one.checks]
    return {"mixed_precision": as_option(one.proposal), "checks": checks}


def _cost_document(cost: UnitCost) -> dict[str, object]:
    def finite(value: float | None) -> float | None:
        return value if value is not None and math.isfinite(value) else None

    return {
        "name": cost.unit.name,
        "kind": cost.unit.kind,
        "tensors": sorted(cost.unit.low),
        "bits": cost.unit.bits,
        "bytes_more": cost.unit.bytes_more,
        "sqnr_db": finite(cost.sqnr_db),
        "output_sqnr_db": finite(cost.output_sqnr_db),
        "alone": cost.alone.metrics,
        "without": None if cost.rest is None else cost.rest.metrics,
    }
