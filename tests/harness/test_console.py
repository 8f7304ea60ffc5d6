"""Tables into pipes and on narrow terminals: nothing is cut, nothing folded."""

import io
import json

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.console import (
    NumberColumn,
    PlainConsole,
    Row,
    answers,
    print_json,
    print_numbers,
    print_remark,
    print_rows,
)

HEADINGS = ("name", "state", "load", "tags", "why")
LONG = "it stopped answering while files were pushed to it, and no step of recovery helped: " * 2
ROWS = (
    Row(
        ["pixel-9", Text("absent", "red"), "9", "lab nightly", LONG.strip()], ["it was lost twice"]
    ),
    Row(["s25", "ready", "12", "", ""]),
)


def shown(*, terminal: bool, width: int) -> list[str]:
    file = io.StringIO()
    console = Console(
        file=file, force_terminal=terminal, width=width, color_system=None,
        soft_wrap=True, highlight=False,
    )  # fmt: skip
    print_rows(HEADINGS, ROWS, right={"load"}, console=console)
    return file.getvalue().splitlines()


def test_a_pipe_gets_a_line_for_each_row_whatever_the_width() -> None:
    head, pixel, beneath, s25 = shown(terminal=False, width=40)
    assert head == "name     state   load  tags         why"
    assert pixel == f"pixel-9  absent     9  lab nightly  {LONG.strip()}"
    assert beneath == "  it was lost twice"
    assert s25 == "s25      ready     12"


def test_a_wide_terminal_gets_the_same() -> None:
    assert shown(terminal=True, width=300) == shown(terminal=False, width=300)


def test_cells_too_wide_for_a_terminal_stand_beneath_their_row() -> None:
    assert shown(terminal=True, width=80) == [
        "name     state   load  tags",
        "pixel-9  absent     9  lab nightly",
        f"  {LONG.strip()}",
        "  it was lost twice",
        "s25      ready     12",
    ]
    assert shown(terminal=True, width=30)[:4] == [
        "name     state   load",
        "pixel-9  absent     9",
        f"  tags lab nightly, {LONG.strip()}",
        "  it was lost twice",
    ]


def test_the_first_column_stays_on_the_narrowest_terminal() -> None:
    lines = shown(terminal=True, width=3)
    assert lines[0] == "name"
    assert lines[1] == "pixel-9"
    assert "state absent, load 9" in lines[2]


def test_a_text_of_several_lines_stays_in_its_row() -> None:
    file = io.StringIO()
    print_rows(("a", "b"), [Row(["x", "one\ntwo"])], console=Console(file=file, soft_wrap=True))
    assert file.getvalue() == "a  b\nx  one two\n"


HOSTILE = "llama\x1b[31m\x9b31m\u202e[red]\x7f"
SHOWN = "llama\u241b[31m[U+009B]31m[U+202E][red]\u2421"


def test_nothing_that_is_printed_is_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    console = answers()
    console.print(f"{HOSTILE} on :smile: device")
    table = Table()
    table.add_column(HOSTILE)
    table.add_row(HOSTILE)
    console.print(table)
    print_rows((HOSTILE, "b"), [Row([HOSTILE, Text(HOSTILE)], [HOSTILE])])
    print_numbers("name", [HOSTILE], [NumberColumn(HOSTILE, [HOSTILE], 0)], console=console)
    print_remark(f"{HOSTILE}\nand more")
    printed = capsys.readouterr()
    assert f"{SHOWN} on :smile: device" in printed.out
    assert printed.err == f"{SHOWN} and more\n"
    assert printed.out.count(SHOWN) == 10
    assert not set(printed.out + printed.err) & set("\x1b\x07\x9b\u202e\x7f")


def test_a_terminal_gets_our_styles_and_nobody_elses() -> None:
    file = io.StringIO()
    console = PlainConsole(file=file, force_terminal=True, color_system="standard")
    console.print(Text(HOSTILE, "red"))
    assert file.getvalue() == f"\x1b[31m{SHOWN}\x1b[0m\n"


def test_json_escapes_what_a_terminal_would_obey(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"name": HOSTILE, "ä": "\u2028"})
    printed = capsys.readouterr().out
    assert json.loads(printed) == {"name": HOSTILE, "ä": "\u2028"}
    assert "ä" in printed
    assert printed.replace("\n", "").isprintable()
