"""What is wrong with a file that a person wrote, in our words instead of pydantic's."""

import re
from collections.abc import Collection, Iterable

from pydantic_core import ErrorDetails

_LONGEST = 280
_SHOULD = re.compile(r"^\w+ should ")
_LISTS = {"tuple_type", "list_type", "frozen_set_type", "set_type"}
_WORDS = {
    "extra_forbidden": "there is no such key",
    "missing": "it is missing",
    "dict_type": "must be a mapping of keys",
    "model_type": "must be a mapping of keys",
    "model_attributes_type": "must be a mapping of keys",
    "string_type": "must be a text",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "union_tag_not_found": "`kind` is missing",
}


def reason(error: ErrorDetails, texts: Collection[str] = ()) -> str:
    """One complaint.

    Args:
        texts: the keys that hold lists of texts.
    """
    kind = error["type"]
    if kind in _LISTS:
        return "must be a list of texts" if error["loc"][-1] in texts else "must be a list"
    if kind == "union_tag_invalid":
        context = error["ctx"]
        return f"there is no kind {context['tag']!r}, but {context['expected_tags']}"
    said = _WORDS.get(kind) or error["msg"].removeprefix("Value error, ")
    return _SHOULD.sub("must ", said)


def together(first: str, others: Iterable[str]) -> str:
    """What is wrong first, with as much of the rest as a line holds."""
    told, left = first, 0
    for other in others:
        if left or len(told) + len(other) > _LONGEST - 20:
            left += 1
        else:
            told += f"; {other}"
    return f"{told}; and {left} more" if left else told
