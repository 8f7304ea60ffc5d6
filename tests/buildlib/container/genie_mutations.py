"""Random mutations of valid Genie configurations: values, keys, lists, and the text itself."""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

from tests.buildlib.container.genie_configurations import Configuration, Path, places

_NUMBERS = (
    "0", "1", "2", "3", "-1", "-2", "-0", "1.0", "2.0", "1e0", "0.0", "-0.0", "0.5", "-0.5", "1.5",
    "100", "1e-46", "1e-400", "1e10", "1e18", "1e20", "3.4028234663852886e38", "3.402823466e38",
    "3.5e38", "1e39", "1e308", "1e309", "-1e309", "2147483647", "2147483648", "-2147483648",
    "-2147483649", "4294967295", "4294967296", "9223372036854775807", "9223372036854775808",
    "-9223372036854775808", "-9223372036854775809", "18446744073709551615", "18446744073709551616",
    "1000000000000000000000000000000",
)  # fmt: skip
_NO_JSON = ("NaN", "Infinity", "0x10", "01", "+1", ".5", "1.", "1e", "True", "'a'", "", "1 2", "//")
_OTHERS = (
    "null", "true", "false", '""', '" "', '"a"', '"0x0"', '"0X1F"', '"0xg"', '"1"', '"native"',
    '"\\u0000"', '"\\ud800"', '"\u00e9\\n"', "[]", "{}", "[null]", "[1]", '["a"]', '[""]', "[{}]",
    '{"version": 1}', "[1, 2]", "[1.5]", '["a", "b"]', "[[1]]", '{"surprise": 1}',
)  # fmt: skip
_MARK = "@%d@"


class _Tree:
    """A configuration that is being changed; what JSON values cannot say is put in as text.

    A mark stands for each such text, so that objects can have a key twice.
    """

    def __init__(self, values: object, rng: random.Random) -> None:
        self.values = copy.deepcopy(values)
        self.rng = rng
        self._texts: list[tuple[str, str]] = []

    def raw(self, text: str) -> str:
        """Return the mark of a text."""
        mark = _MARK % len(self._texts)
        self._texts.append((json.dumps(mark), text))
        return mark

    def text(self) -> str:
        found = json.dumps(self.values)
        for mark, text in reversed(self._texts):
            found = found.replace(mark, text)
        return found

    def at(self, path: Path) -> tuple[Any, Any]:
        """Return the object or array that holds a place, and its key there."""
        holder: Any = self.values
        for step in path[:-1]:
            holder = holder[step]
        return holder, path[-1]


def _other_value(tree: _Tree, words: tuple[str, ...], value: object = None) -> str:
    """Return another value, three times of four of the type of the one that is there."""
    rng = tree.rng
    number = isinstance(value, int | float) and not isinstance(value, bool)
    weights = (12 if number else 4, 4, 12 if isinstance(value, str) else 3, 1)
    pool = rng.choices((_NUMBERS, _OTHERS, words, _NO_JSON), weights)[0]
    return tree.raw(rng.choice(pool))


def _misspelled(key: str, rng: random.Random) -> str:
    forms = (key.upper(), key.title(), key.replace("-", "_"), key + "s", key[:-1], f" {key}", "")
    return rng.choice(forms)


def _change(tree: _Tree, path: Path, words: tuple[str, ...], keys: tuple[str, ...]) -> None:
    """Make one change at a place."""
    rng = tree.rng
    holder, key = tree.at(path)
    value = holder[key]
    kinds = ["value"] * 10 + ["remove"] * 3 + ["move"] * 2
    if isinstance(holder, dict):
        kinds += ["twice"] * 4 + ["key"] * 2 + ["add"] * 3
    if isinstance(value, list):
        kinds += ["insert"] * 5
    match rng.choice(kinds):
        case "value":
            holder[key] = _other_value(tree, words, value)
        case "remove":
            del holder[key]
        case "twice":  # before or behind the first one, with the same value or another
            again = value if rng.random() < 0.4 else _other_value(tree, words, value)
            pairs = [(key, value), (tree.raw(json.dumps(key)), again)]
            rest = {name: other for name, other in holder.items() if name != key}
            holder.clear()
            holder.update([*rng.sample(pairs, 2), *rest.items()])
        case "key":
            holder[_misspelled(key, rng)] = holder.pop(key)
        case "add":
            holder[rng.choice(keys)] = _other_value(tree, words)
        case "move":
            other, its_key = tree.at(rng.choice(list(places(tree.values)))[0])
            holder[key] = copy.deepcopy(other[its_key])
        case _:
            value.insert(rng.randint(0, len(value)), _other_value(tree, words))


def _garble(text: str, rng: random.Random) -> bytes:
    """Damage the text itself."""
    data = text.encode()
    at = rng.randrange(len(data))
    match rng.randrange(7):
        case 0:
            return data[:at]
        case 1:
            return data + rng.choice((b" ", b"\n\n", b"{}", b",", b"\0", b"// end"))
        case 2:
            return b"\xef\xbb\xbf" + data
        case 3:
            return data[:at] + rng.randbytes(1) + data[at + 1 :]
        case 4:
            return data[:at] + data[at + 1 :]
        case 5:
            return data.replace(b"}", rng.choice((b",}", b"/**/}", b"\t}")), 1)
        case _:
            return data.replace(b'"version"', b'"v\\u0065rsion"', 1)


def mutate(
    valid: list[Configuration], count: int, seed: int
) -> Iterator[tuple[Configuration, bytes]]:
    """Yield configurations, each with the text of a mutation of it.

    What several configurations have is changed no more often than what a single one has. One change
    is made in four of five, and two in the others.
    """
    rng = random.Random(seed)  # noqa: S311 - no secret
    found = [(path[-1], value) for each in valid for path, value in places(each.values)]
    chosen = [(each, path) for each in valid for path, _ in places(each.values, each.base)]
    keys = tuple(sorted({key for key, _ in found if isinstance(key, str)}))
    texts = {value for _, value in found if isinstance(value, str)}
    words = tuple(sorted({json.dumps(form) for t in texts for form in (t, t.upper(), t.lower())}))
    for _ in range(count):
        each, path = rng.choice(chosen)
        tree = _Tree(each.values, rng)
        _change(tree, path, words, keys)
        if rng.random() < 0.2 and (others := list(places(tree.values))):
            _change(tree, rng.choice(others)[0], words, keys)
        text = tree.text()
        damaged = rng.random() < 0.04
        yield each, _garble(text, rng) if damaged else text.encode("utf-8", "surrogatepass")
