from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_scripts import genie_app
from device_scripts.genie_app import parse_script

if TYPE_CHECKING:
    from device_scripts.genie_app_script import Command, Loop, ScriptError, Word, split_line
else:
    from genie_app_script import Command, Loop, ScriptError, Word, split_line

PLAIN = st.text(
    st.characters(exclude_characters='"', exclude_categories=["Z", "Cc", "Cs"]), min_size=1
)
QUOTED = st.text(st.characters(exclude_characters='"\n', exclude_categories=["Cs"]))
WORDS = st.lists(
    st.one_of(
        PLAIN.filter(lambda t: not t[0].isspace() and len(t.split()) == 1).map(
            lambda t: Word(t, quoted=False)
        ),
        QUOTED.map(lambda t: Word(t, quoted=True)),
    ),
    min_size=1,
)
REFUSED = "is documented for genie-app but not supported here"


def write(words: list[Word]) -> str:
    return "  ".join(f'"{w.text}"' if w.quoted else w.text for w in words)


@given(WORDS)
def test_words_survive_writing_and_splitting(words: list[Word]) -> None:
    assert split_line(write(words), 1) == words


@given(st.text())
def test_any_text_is_parsed_or_refused_with_its_line(text: str) -> None:
    refused = None
    try:
        parse_script(text)
    except ScriptError as error:
        refused = error
    if refused is not None:
        assert 1 <= refused.line <= text.count("\n") + 1
        assert "\n" not in str(refused)


@given(st.lists(st.sampled_from(["loop 2", "endloop", "version", "# loop 3", "", "  ls  "])))
def test_loops_nest_or_are_refused(lines: list[str]) -> None:
    depth = lowest = 0
    for line in lines:
        depth += (line == "loop 2") - (line == "endloop")
        lowest = min(lowest, depth)
    if depth == 0 and lowest == 0:

        def count(statements: tuple[object, ...]) -> int:
            return sum(count(s.body) if isinstance(s, Loop) else 1 for s in statements)

        expected = sum(line in {"version", "  ls  "} for line in lines)
        assert count(parse_script("\n".join(lines))) == expected
    else:
        with pytest.raises(ScriptError, match="loop"):
            parse_script("\n".join(lines))


def test_the_documented_order_parses() -> None:
    script = """
    # the documented order
    profile create p
    dialog config create c genie_config.json
    dialog config bind profile c p
    dialog create d c
    dialog query d "What # is \\n this?" out.txt
    profile save p profile.json
    dialog config free c
    exit
    """
    statements = parse_script(script)
    assert statements[4] == Command(
        7,
        ("dialog", "query"),
        (
            Word("d", quoted=False),
            Word("What # is \\n this?", quoted=True),
            Word("out.txt", quoted=False),
        ),
    )
    assert len(statements) == 8


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "version\nnonsense here",
            "line 2: unknown command: nonsense here (genie-app -h lists all)",
        ),
        ('dialog query d "open', "line 1: a quote is not closed"),
        ('dialog query d "a"b', "line 1: a space is missing after a closing quote"),
        ('dialog query d a"b"', 'line 1: a quote inside a word: a"b"'),
        ("dialog create d", "line 1: usage: dialog create DIALOG_NAME CONFIG_NAME"),
        ("sleep", "line 1: usage: sleep MILLISECONDS"),
        ("loop x\nendloop", "line 1: usage: loop COUNT (0 to 1000000)"),
        ("loop 99999999999\nendloop", "line 1: usage: loop COUNT (0 to 1000000)"),
        ("\nloop 1\nversion", "line 2: loop without endloop"),
        ("endloop", "line 1: endloop without loop"),
        ("loop 1\n" * 40, "line 33: loops nest deeper than 32"),
        (
            "dialog batchQuery d",
            (
                f"line 1: 'dialog batchQuery' {REFUSED}: it takes graphs of several batches, which "
                "nothing here builds (Genie fails others, -6)"
            ),
        ),
        (
            "pipeline connect p a 101 b 1",
            (
                f"line 1: 'pipeline connect' {REFUSED}: the public documentation does not tell its "
                "arguments"
            ),
        ),
        ('"version"', "line 1: unknown command: version (genie-app -h lists all)"),
    ],
)
def test_a_wrong_line_is_named(script: str, message: str) -> None:
    with pytest.raises(ScriptError) as caught:
        parse_script(script)
    assert str(caught.value) == message


def test_help_prints_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        genie_app.main(["-h"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    for usage in genie_app._USAGES:
        assert f"\n  {usage.text}" in printed
    assert "accuracy compute ACCURACY_NAME [OUTPUT_FILE]    (spelling ours)" in printed


def test_every_command_of_the_language_is_carried_out() -> None:
    app = genie_app.App(None)  # type: ignore[arg-type]  # the library is not touched
    for usage in genie_app._USAGES:
        assert usage.words in app._commands or usage.words[-1] == "free"


def test_a_wrong_script_ends_with_status_2_before_the_library_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "s").write_bytes(b"version\n\xff\xfe\n")
    assert genie_app.main(["-s", str(tmp_path / "s")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.endswith("s: line 2: not UTF-8\n")
    assert genie_app.main(["-s", str(tmp_path / "missing")]) == 1
