"""Random mutations of valid Genie configurations: values, keys, lists, and the text itself."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.buildlib.container.genie_configurations import Configuration, places
from tests.fuzz.mutations import change_json, damaged, pick

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
_VALUE, _KEY = "@value@", "@key@"
"""Stand for what no JSON value can say: another number's text, and a key that is there already."""


def mutate(
    valid: list[Configuration], count: int, seed: int
) -> Iterator[tuple[Configuration, bytes]]:
    """Yield configurations, each with the text of a mutation of it.

    What several configurations have is changed no more often than what a single one has. One change
    is made in four of five, and two in the others.
    """
    rng = np.random.default_rng(seed)
    chosen = [(each, path) for each in valid for path, _ in places(each.values, each.base)]
    texts = {value for each in valid for _, value in places(each.values) if isinstance(value, str)}
    words = tuple(sorted({json.dumps(form) for t in texts for form in (t, t.upper(), t.lower())}))
    for _ in range(count):
        each, path = pick(rng, chosen)
        values = copy.deepcopy(each.values)
        holder: Any = values
        for step in path[:-1]:
            holder = holder[step]
        key, value, how = path[-1], holder[path[-1]], rng.random()
        if how < 0.2 and isinstance(holder, dict):  # twice, before or behind the first one
            again = {_KEY: value if rng.random() < 0.4 else _VALUE}
            items = {**again, **holder} if rng.random() < 0.5 else {**holder, **again}
            holder.clear()
            holder.update(items)
        elif how < 0.4 and isinstance(value, list):
            value.insert(int(rng.integers(len(value) + 1)), _VALUE)
        elif how < 0.8:
            holder[key] = _VALUE
        if how >= 0.8 or rng.random() < 0.2:
            change_json(rng, values)
        number = isinstance(value, int | float) and rng.random() < 0.7
        raw = _NUMBERS if number else pick(rng, [_NUMBERS, _OTHERS, words, words, _NO_JSON])
        text = json.dumps(values).replace(json.dumps(_KEY), json.dumps(key))
        data = text.replace(json.dumps(_VALUE), pick(rng, raw)).encode("utf-8", "surrogatepass")
        yield each, damaged(rng, data) if rng.random() < 0.04 else data
