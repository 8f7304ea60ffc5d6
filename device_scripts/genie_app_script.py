"""Script language of ``genie-app``: one command a line, parsed completely before anything runs.

A word in double quotes is a literal text (no escapes are documented); any other word is a name or a
path. ``loop COUNT`` ... ``endloop`` nest. A line that starts with ``#`` is a comment.
"""

from typing import Dict, List, NamedTuple, Optional, Tuple, Union

Word = NamedTuple("Word", [("text", str), ("quoted", bool)])
Command = NamedTuple(
    "Command", [("line", int), ("words", Tuple[str, ...]), ("arguments", Tuple[Word, ...])]
)


class Loop(NamedTuple):
    """A block that runs ``times`` times."""

    line: int
    times: int
    body: Tuple["Statement", ...]


Statement = Union[Command, Loop]

_LARGEST_COUNT = 1000000
_MOST_NESTED = 32


class ScriptError(Exception):
    """A line of a script is wrong; the program ends with exit status 2."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(line, reason)
        self.line = line
        self.reason = reason

    def __str__(self) -> str:
        return f"line {self.line}: {self.reason}"


class Usage:
    """Syntax of a command: fixed words, then arguments in upper case.

    ``[optional]`` ones come last; ``...`` at the end allows the arguments to repeat.
    """

    def __init__(self, text: str, note: str = "") -> None:
        parts = text.split()
        self.text = text
        self.note = note
        self.words = tuple(part for part in parts if part.islower() or part in _MIXED_CASE)
        arguments = parts[len(self.words) :]
        self.fewest = sum(not part.startswith("[") and part != "..." for part in arguments)
        self.most = None if "..." in arguments else len(arguments)

    def accepts(self, count: int) -> bool:
        """Return whether the command takes this number of arguments."""
        return count >= self.fewest and (self.most is None or count <= self.most)


_MIXED_CASE = frozenset(
    (
        "addNode",
        "applyLora",
        "batchQuery",
        "bindEngine",
        "embeddingQuery",
        "embeddingTokenQuery",
        "rewindQuery",
        "setLoraStrength",
        "setMaxNumTokens",
        "setPerformance",
        "setPriority",
        "setStopSequence",
        "setText",
        "tokenQuery",
    )
)


def split_line(text: str, line: int) -> List[Word]:
    """Return the words of a line."""
    words: List[Word] = []
    rest = text.strip()
    while rest:
        if rest.startswith('"'):
            end = rest.find('"', 1)
            if end < 0:
                raise ScriptError(line, "a quote is not closed")
            words.append(Word(rest[1:end], quoted=True))
            following = rest[end + 1 :]
            if following and not following[0].isspace():
                raise ScriptError(line, "a space is missing after a closing quote")
            rest = following.lstrip()
            continue
        word = rest.split(None, 1)[0]
        if '"' in word:
            raise ScriptError(line, f"a quote inside a word: {word}")
        words.append(Word(word, quoted=False))
        rest = rest[len(word) :].lstrip()
    return words


def parse(
    text: str, usages: Dict[Tuple[str, ...], Usage], unsupported: Dict[Tuple[str, ...], Usage]
) -> Tuple[Statement, ...]:
    """Parse the statements of a script.

    Args:
        text: The script.
        usages: Supported commands by their fixed words.
        unsupported: Documented commands that are refused by name.
    """
    blocks: List[List[Statement]] = [[]]
    loops: List[Tuple[int, int]] = []
    for line, raw in enumerate(text.split("\n"), start=1):
        words = [] if raw.lstrip().startswith("#") else split_line(raw, line)
        if not words:
            continue
        first = "" if words[0].quoted else words[0].text
        if first == "loop":
            loops.append((line, _count(words[1:], line)))
            if len(loops) > _MOST_NESTED:
                raise ScriptError(line, f"loops nest deeper than {_MOST_NESTED}")
            blocks.append([])
        elif first == "endloop":
            if len(words) > 1:
                raise ScriptError(line, "usage: endloop")
            if not loops:
                raise ScriptError(line, "endloop without loop")
            first_line, count = loops.pop()
            body = tuple(blocks.pop())
            blocks[-1].append(Loop(first_line, count, body))
        else:
            blocks[-1].append(_command(words, line, usages, unsupported))
    if loops:
        raise ScriptError(loops[-1][0], "loop without endloop")
    return tuple(blocks[0])


def _count(arguments: List[Word], line: int) -> int:
    if len(arguments) == 1 and arguments[0].text.isdigit() and len(arguments[0].text) <= 7:
        count = int(arguments[0].text)
        if count <= _LARGEST_COUNT:
            return count
    raise ScriptError(line, f"usage: loop COUNT (0 to {_LARGEST_COUNT})")


def _command(
    words: List[Word],
    line: int,
    usages: Dict[Tuple[str, ...], Usage],
    unsupported: Dict[Tuple[str, ...], Usage],
) -> Command:
    command = _longest(words, usages)
    if command is None:
        name = _longest(words, unsupported)
        if name is not None:
            reason = f"'{' '.join(name)}' is documented for genie-app but not supported here"
            raise ScriptError(line, f"{reason}: {unsupported[name].note}")
        start = " ".join(word.text for word in words[:3])
        raise ScriptError(line, f"unknown command: {start[:80]} (genie-app -h lists all)")
    arguments = tuple(words[len(command) :])
    if not usages[command].accepts(len(arguments)):
        raise ScriptError(line, f"usage: {usages[command].text}")
    return Command(line, command, arguments)


def _longest(words: List[Word], usages: Dict[Tuple[str, ...], Usage]) -> Optional[Tuple[str, ...]]:
    for length in (4, 3, 2, 1):
        head = tuple(word.text for word in words[:length] if not word.quoted)
        if len(head) == length and head in usages:
            return head
    return None
