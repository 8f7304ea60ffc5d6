"""Groups of options: of a parameter that is a dataclass, each field is an option of its own."""

import functools
from collections.abc import Callable
from dataclasses import is_dataclass
from inspect import Parameter, Signature, signature
from typing import Any, TypeVar, cast

_Command = TypeVar("_Command", bound=Callable[..., object])


def with_groups(command: _Command) -> _Command:
    """Give a command for typer the options of its groups, which it takes as dataclasses."""
    parameters = signature(command).parameters
    groups: dict[str, type[Any]] = {
        name: one.annotation
        for name, one in parameters.items()
        if isinstance(one.annotation, type) and is_dataclass(one.annotation)
    }
    options: dict[str, Parameter] = {}
    for name, parameter in parameters.items():
        options |= signature(groups[name]).parameters if name in groups else {name: parameter}

    @functools.wraps(command)
    def call(**values: object) -> object:
        for name, group in groups.items():
            values[name] = group(**{one: values.pop(one) for one in signature(group).parameters})
        return command(**values)

    call.__annotations__ = {name: one.annotation for name, one in options.items()}
    vars(call)["__signature__"] = Signature(
        [one.replace(kind=Parameter.KEYWORD_ONLY) for one in options.values()]
    )
    return cast("_Command", call)
