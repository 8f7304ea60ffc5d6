"""Which scripts a command line for a shell starts, as far as its text tells.

A script is started by its path, or as the first argument of a shell; wherever a command may stand,
also in what a shell is given with `-c` and in a substitution. A name that is an argument of
anything else, a file to read or to write, or in a comment, starts nothing.
"""

import re
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Final

_SHELLS: Final = frozenset({"sh", "dash", "bash", "mksh"})
_BEFORE: Final = frozenset({"if", "then", "elif", "else", "while", "until", "do", "!", "{"})
"""Reserved words that a command follows."""
_WRAPPERS: Final = frozenset(
    {"exec", "command", "nohup", "setsid", "env", "nice", "time", "timeout", "toybox", "busybox"}
)
_WRAPPED: Final = re.compile(r"-.*|\d+", re.DOTALL)
"""What stands between a wrapper and its command."""
_SETTING: Final = re.compile(r"[A-Za-z_][A-Za-z_0-9]*=.*", re.DOTALL)
_MOST_TEXTS: Final = 50

_PLAIN: Final = re.compile(
    r"""(?P<blank> (?: [ \t\r] | \\\n )+ )
    | (?P<comment> (?<! [^\s;&|()] ) \# [^\n]* )
    | (?P<file> (?: (?<! [^\s;&|()] ) \d+ )? [<>]+ [&|-]? [ \t]* )
    | (?P<begin> \$?\( )
    | (?P<end> \) )
    | (?P<next> [;&|\n] )
    | (?P<tick> ` )
    | (?P<quote> " )
    | ' (?P<single> [^']* ) '?
    | \\ (?P<escaped> . )
    | (?P<text> [^ \t\r\n\\;&|()<>`"'$]+ | . )""",
    re.VERBOSE | re.DOTALL,
)
_QUOTED: Final = re.compile(
    r"""(?P<begin> \$\( )
    | (?P<tick> ` )
    | (?P<quote> " )
    | \\ (?P<escaped> [$`"\\] )
    | (?P<text> [^$`"\\]+ | . )""",
    re.VERBOSE | re.DOTALL,
)


def starts(command: bytes, script: str) -> bool:
    """Whether a command line starts a script of that name, in whichever folder it lies."""
    if script.encode() not in command:
        return False
    texts = [command.decode("utf-8", "replace")]
    for text in texts:
        for words in simple_commands(text):
            started, line = _started(words)
            if PurePosixPath(started).name == script:
                return True
            if line and len(texts) < _MOST_TEXTS:
                texts.append(line)
    return False


@dataclass(slots=True)
class _Frame:
    """Where commands stand: the line itself, or a substitution or subshell in it."""

    end: str = ""
    words: list[str] = field(default_factory=list)
    word: str | None = None
    quoted: bool = False
    file_follows: bool = False

    def end_word(self) -> None:
        if self.word is not None and not self.file_follows:
            self.words.append(self.word)
        if self.word is not None:
            self.file_follows = False
        self.word = None

    def end_command(self) -> list[str]:
        self.end_word()
        words, self.words, self.file_follows = self.words, [], False
        return words


def simple_commands(text: str) -> list[list[str]]:
    """The words of each simple command in a command line, without quotes and redirections.

    Nothing is expanded; in the place of a substitution is nothing, and its commands come first.
    The lines of a here-document count as commands. Text that no shell takes is read on.

    >>> simple_commands('''cd "/a b" && exec x 2>/dev/null "$(y 'z')"; w # v''')
    [['cd', '/a b'], ['y', 'z'], ['exec', 'x', ''], ['w']]
    """
    commands = []
    frames = [_Frame()]
    at = 0
    while match := (_QUOTED if frames[-1].quoted else _PLAIN).match(text, at):
        at = match.end()
        frame = frames[-1]
        match match.lastgroup:
            case "quote":
                frame.quoted = not frame.quoted
                frame.word = frame.word or ""
            case "begin" | "tick" if frame.end != match[0]:
                if match[0] == "(":
                    commands.append(frame.end_command())
                else:
                    frame.word = frame.word or ""
                frames.append(_Frame(")" if match[0].endswith("(") else "`"))
            case "begin" | "end" | "tick" | "next":
                commands.append(frame.end_command())
                if len(frames) > 1 and frame.end == match[0]:
                    frames.pop()
            case "blank":
                frame.end_word()
            case "file":
                frame.end_word()
                frame.file_follows = True
            case "comment":
                pass
            case group:
                frame.word = (frame.word or "") + match[group or 0]
    commands += [frame.end_command() for frame in reversed(frames)]
    return [words for words in commands if words]


def _started(words: list[str]) -> tuple[str, str]:
    """The path that a simple command starts, or the command line that it has a shell run."""
    program, *arguments = _unwrapped(words) or [""]
    if program == "eval":
        return "", " ".join(arguments)
    if program != "." and PurePosixPath(program).name not in _SHELLS:
        return program, ""
    line_follows = False
    for argument in arguments:
        if not argument.startswith("-"):
            return ("", argument) if line_follows else (argument, "")
        line_follows = line_follows or (not argument.startswith("--") and "c" in argument)
    return "", ""


def _unwrapped(words: list[str]) -> list[str]:
    """From the program on that all before it is there for."""
    wrapped = False
    for at, word in enumerate(words):
        if PurePosixPath(word).name in _WRAPPERS:
            wrapped = True
        elif not (
            word in _BEFORE or _SETTING.fullmatch(word) or (wrapped and _WRAPPED.fullmatch(word))
        ):
            return words[at:]
    return []
