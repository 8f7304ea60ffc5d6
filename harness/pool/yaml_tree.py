"""A YAML file as a tree that knows its lines."""

import yaml

from harness.errors import PoolConfigError

_DEEPEST = 20


def tree_of(text: str, where: str) -> yaml.Node | None:
    """The tree of the file, which knows lines; `None` of an empty one.

    Raises:
        PoolConfigError: it is no YAML, is nested too deeply, gives a key twice or has aliases.
    """
    depth = 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:  # deeper ones take PyYAML minutes
                raise PoolConfigError(where, None, "", "it is nested too deeply")
            if isinstance(event, yaml.AliasEvent):
                line = event.start_mark.line + 1 if event.start_mark else None
                raise PoolConfigError(where, line, "", "aliases (`*name`) are not supported")
        node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
        _refuse_twice(node, where)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = None if mark is None else mark.line + 1
        raise PoolConfigError(where, line, "", error.problem or "it is no YAML") from None
    except yaml.YAMLError as error:
        raise PoolConfigError(where, None, "", str(error)) from None
    except RecursionError:
        raise PoolConfigError(where, None, "", "it is nested too deeply") from None
    return node


def _refuse_twice(node: yaml.Node | None, where: str) -> None:
    """A key given twice would silently lose one of its values."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            if name in seen:
                line = key.start_mark.line + 1
                raise PoolConfigError(where, line, name, "the key is given twice")
            seen.add(name)
            _refuse_twice(value, where)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _refuse_twice(value, where)


def place_of(root: yaml.Node | None, location: tuple[int | str, ...]) -> tuple[int | None, str]:
    """Line and path of what pydantic complains of, as near as the tree leads."""
    node, line, path = root, None if root is None else root.start_mark.line + 1, ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step != "[key]":
            path += f".{step}" if path else str(step)
        found: yaml.Node | None = None
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if key.value == step:
                    found, line = value, key.start_mark.line + 1
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int):
            found = node.value[step] if step < len(node.value) else None
            line = line if found is None else found.start_mark.line + 1
        node = found
    return line, path
