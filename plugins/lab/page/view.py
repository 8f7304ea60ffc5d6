"""The page as fragments of HTML by their ids, so that a change sends only its own."""

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

import jinja2

from harness.pool.requirement import MemberStatus
from harness.results.provenance import own_version
from plugins.lab.page.board import Board
from reports import text
from reports.html_file import make_environment, read_template

SECTIONS = ("verdict", "broken", "alerts", "plans", "running", "waiting", "hosts", "counts")
"""Ids of the fragments that are sent whole; of the devices, each row is a fragment."""
_ROW = "device-"


@dataclass(frozen=True, slots=True)
class View:
    """A board, rendered.

    Attributes:
        fragments: HTML by the id of its element.
        rows: ids of the rows of the devices, in their order.
    """

    fragments: Mapping[str, str]
    rows: tuple[str, ...]

    @classmethod
    def of(cls, board: Board) -> "View":
        """Render a board."""
        fragments = {name: _render(name, board) for name in SECTIONS}
        rows = {
            f"{_ROW}{number}": _render_row(f"{_ROW}{number}", device, board.temperature(device))
            for number, device in enumerate(board.devices)
        }
        return cls(fragments | rows, tuple(rows))

    @property
    def digest(self) -> str:
        """A digest that only an equal view has."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    def since(self, before: "View | None") -> str:
        """Return the changes as JSON: HTML by id, and all rows where there are more or fewer."""
        if before is None or before.rows != self.rows:
            sections = {name: self.fragments[name] for name in SECTIONS}
            rows = "".join(self.fragments[row] for row in self.rows)
            return json.dumps({"html": sections, "rows": rows})
        old = before.fragments
        news = {key: html for key, html in self.fragments.items() if old[key] != html}
        return json.dumps({"html": news}) if news else ""


def _render(macro: str, *values: object) -> str:
    parts = _environment().get_template("parts.html.j2").module
    return str(getattr(parts, macro)(*values))


@functools.lru_cache(maxsize=2048)
def _render_row(key: str, device: MemberStatus, temperature: float | None) -> str:
    """Render a device's row, once for each of its states: hundreds of rows take time."""
    return _render("row", key, device, temperature)


def render_page(view: View, *, user: str, acts: bool, signs_in: bool) -> str:
    """Render the whole page.

    Args:
        user: empty if nobody is signed in.
        acts: whether that user may act.
        signs_in: whether a token can be given.
    """
    template = _environment().get_template("page.html.j2")
    return template.render(
        view=view, user=user, acts=acts, signs_in=signs_in, version=own_version()
    )


def render_sign_in(reason: str) -> str:
    """Render the form that asks for a token."""
    template = _environment().get_template("sign_in.html.j2")
    return template.render(reason=reason, version=own_version())


def read_style() -> str:
    """Read the style of the page: that of a report, and its own."""
    return read_template("style.css") + read_own("lab.css")


def read_own(name: str) -> str:
    """Read a file of the page's templates as it is."""
    return read_template(name, __package__)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = make_environment(__package__)
    environment.filters["epoch"] = _show_epoch
    environment.globals["count_states"] = _count_states
    return environment


def _show_epoch(seconds: float) -> str:
    return text.moment(datetime.fromtimestamp(seconds, UTC))


def _count_states(devices: tuple[MemberStatus, ...]) -> Mapping[str, int]:
    states = [device.seen if device.is_unsure else str(device.state) for device in devices]
    return {state: states.count(state) for state in sorted(set(states))}
