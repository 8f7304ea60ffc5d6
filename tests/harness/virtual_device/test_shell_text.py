"""Which command lines start a script, and which only name it."""

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.deploy.scripts import intact, scripts_folder
from harness.devices.commands import command_line
from harness.devices.job import Job
from harness.pool.fence import Fence
from harness.virtual_device.shell_text import simple_commands, starts

_ROOT = "/data/local/tmp/it's here"
_SCRIPTS = scripts_folder(_ROOT)
_FENCE = Fence(_ROOT, 7, "c0ffee00-0000-4000-8000-000000000000", _SCRIPTS)

STARTING = [
    "run.sh",
    "./run.sh 1",
    "sh -e run.sh",
    "sh -ec 'cd x; sh run.sh'",
    "(sh run.sh)",
    "true;sh run.sh",
    "true\nsh run.sh",
    "# don't\nsh run.sh",
    'x="$(sh run.sh)"',
    "echo `sh run.sh`",
    '"$(echo "a b")"/run.sh',
    'cd "it\'s" && ./run.sh',
    ": $((1 << 2)); sh run.sh",
    "if sh run.sh; then :; fi",
    "case x in a | b) sh run.sh ;; esac",
    "while ! { sh run.sh; }; do :; done",
    "A=b sh run.sh",
    "env A=b timeout 5 nice -n 3 sh run.sh >log 2>&1 &",
    "/usr/bin/env -i toybox sh run.sh",
    "eval 'sh' run.sh",
    ". ./run.sh",
    "2>&1 >log sh run.sh",
    "sh \\\n run.sh",
    '/system/bin/sh "$dir/run.sh"',
    command_line(["sh", f"{_SCRIPTS}/run.sh", "-o", "o.txt", "/r", "9", "log", "--", "true"]),
]
NAMING = [
    ": run.sh",
    "echo sh run.sh",
    "cat 2>/dev/null run.sh",
    "grep ';' run.sh",
    "echo '; sh run.sh' \"; sh run.sh\" \\; sh run.sh",
    "ls >run.sh",
    "for name in run.sh; do echo $name; done",
    "sh <run.sh",
    "sh other.sh run.sh",
    "sh -c 'cat run.sh'",
    "sh -c 'echo \"$@\"' sh run.sh",
    "true # ; sh run.sh",
    "echo a#b run.sh",
    "find . -name run.sh -exec cat {} \\;",
    "chmod +x run.sh && ls",
    "my-run.sh; run.sh.bak",
    f"{intact(_SCRIPTS)} || exit 97\nexec {command_line(['sh', f'{_SCRIPTS}/fence.sh', _ROOT])}",
]


def _given_to_a_shell(text: str) -> str:
    return f"cd /x && exec sh -c {shlex.quote(text)}"


_LAYERS = st.lists(
    st.sampled_from(
        [
            _given_to_a_shell,
            _FENCE.guarded,
            lambda text: Job(text).script,
            lambda text: Job(text, nested=True).script,
            lambda text: command_line(text, {"NAME": 'it\'s; a "value"'}),
            lambda text: f"({text}\n)",
            lambda text: f"x=$({text}\n)",
        ]
    ),
    max_size=4,
)


@pytest.mark.parametrize("text", STARTING)
def test_what_starts_it(text: str) -> None:
    assert starts(text.encode(), "run.sh")


@pytest.mark.parametrize("text", NAMING)
def test_what_only_names_it(text: str) -> None:
    assert "run.sh" in text
    assert not starts(text.encode(), "run.sh")


@given(st.sampled_from([*STARTING, *NAMING]), _LAYERS)
def test_it_is_seen_through_all_that_the_harness_wraps_around_a_command(
    text: str, layers: list[object]
) -> None:
    wrapped = text
    for layer in layers:
        wrapped = layer(wrapped)  # type: ignore[operator]
    assert starts(wrapped.encode(), "run.sh") == (text in STARTING)


@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1), min_size=1))
def test_words_are_read_as_they_were_quoted(words: list[str]) -> None:
    assert simple_commands(shlex.join(words)) == [words]


@given(st.text("run.sh $()`\"'\\\n#;&|<>-c1", max_size=60).map(lambda text: f"{text}run.sh"))
def test_any_text_is_read_to_its_end(text: str) -> None:
    starts(text.encode(), "run.sh")
    assert sum(len(word) for words in simple_commands(text) for word in words) <= len(text)
