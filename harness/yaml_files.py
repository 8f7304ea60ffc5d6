"""YAML files that people write, read strictly: errors name line and key, and the nearest key."""

from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from buildlib.files import check_file
from buildlib.validation import MISSING, Location, reason_for
from harness.errors import ConfigFileError

MAX_BYTES = 1 << 20
_DEEPEST = 20
_LONGEST = 280
Model = TypeVar("Model", bound=BaseModel)


def read_yaml(path: Path) -> str:
    """Read the text of a YAML file.

    Raises:
        ConfigFileError: the file cannot be read, is larger than 1 MiB, or is no UTF-8.
    """
    try:
        check_file(path)
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigFileError(
            str(path), None, "", f"cannot be read: {error.strerror or error}"
        ) from error
    if len(content) > MAX_BYTES:
        raise ConfigFileError(str(path), None, "", "it is larger than 1 MiB")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigFileError(str(path), None, "", f"it is no UTF-8: {error.reason}") from error


class YamlFile(Generic[Model]):
    """YAML document as a pydantic model, which knows the lines of its keys.

    Args:
        where: names the document in errors.

    Attributes:
        content: the model.

    Raises:
        ConfigFileError: it is not valid YAML, is nested too deeply, gives a key twice, or does not
            fit the model.
    """

    def __init__(self, where: str, text: str, model: type[Model]) -> None:
        self._where = where
        self._root, content = self._parse(text)
        if content is None:
            content = {}
        if not isinstance(content, dict):
            raise self._fail(1, "", "it is no mapping of keys")
        try:
            self.content = model.model_validate(content)
        except ValidationError as error:
            raise self._invalid(error, model) from None

    @classmethod
    def load(cls, path: Path, model: type[Model]) -> Self:
        """Read a file."""
        return cls(str(path), read_yaml(path), model)

    def error(self, location: Location, reason: str) -> ConfigFileError:
        """Make the error of a location in the model."""
        return self._fail(*self._place(location), reason)

    def _fail(self, line: int | None, key: str, reason: str) -> ConfigFileError:
        return ConfigFileError(self._where, line, key, reason)

    def _parse(self, text: str) -> tuple[yaml.Node | None, Any]:
        """Return the tree of the document, and its content."""
        try:
            depth = 0
            for event in yaml.parse(text, Loader=yaml.SafeLoader):
                depth += isinstance(event, yaml.CollectionStartEvent)
                depth -= isinstance(event, yaml.CollectionEndEvent)
                if depth > _DEEPEST:  # PyYAML takes minutes for deeper ones
                    raise RecursionError
            loader = yaml.SafeLoader(text)
            root: yaml.Node | None = loader.get_single_node()
            if root is None:
                return None, None
            self._refuse_same_keys(loader, root, "", set())
            return root, loader.construct_document(root)
        except ConfigFileError:
            raise
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = None if mark is None else mark.line + 1
            problem = error.problem or error.context or "it cannot be read"
            raise self._fail(line, "", f"not valid YAML: {problem}") from error
        except (yaml.YAMLError, ValueError, OverflowError) as error:
            raise self._fail(None, "", f"not valid YAML: {error}") from error
        except RecursionError as error:
            raise self._fail(None, "", "it is nested too deeply") from error

    def _refuse_same_keys(
        self, loader: yaml.SafeLoader, node: yaml.Node, path: str, checked: set[int]
    ) -> None:
        """Refuse a key that is given twice: one of the values would silently be lost."""
        if id(node) in checked:  # an alias
            return
        checked.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            for number, item in enumerate(node.value):
                self._refuse_same_keys(loader, item, f"{path}[{number}]", checked)
        elif isinstance(node, yaml.MappingNode):
            keys: set[Hashable] = set()
            for key_node, value in node.value:
                below = _joined(path, key_node.value)
                if key_node.tag != "tag:yaml.org,2002:merge":
                    key = loader.construct_object(key_node, deep=True)
                    line = key_node.start_mark.line + 1
                    if not isinstance(key, Hashable):
                        raise self._fail(line, path, f"{str(key)[:80]} cannot be a key")
                    if key in keys:
                        raise self._fail(line, below, "the key is given twice")
                    keys.add(key)
                self._refuse_same_keys(loader, value, below, checked)

    def _place(self, location: Location, *, missing: bool = False) -> tuple[int | None, str]:
        """Return line and key of a location in the model, as near as the document leads.

        Parts of the location that the document does not have, such as the variant of a union, are
        left out, but for the last one when it is `missing`.
        """
        node, path = self._root, ""
        line = None if node is None else node.start_mark.line + 1
        tags: set[int] = set()
        for number, step in enumerate(location):
            if isinstance(step, int):
                path += f"[{step}]"
                inside = isinstance(node, yaml.SequenceNode) and step < len(node.value)
                node = node.value[step] if isinstance(node, yaml.SequenceNode) and inside else None
                line = line if node is None else node.start_mark.line + 1
                continue
            values = _values(node)
            kind = values.get("kind")
            if kind is not None and kind[1].value == step and id(node) not in tags:
                tags.add(id(node))  # the variant; another part of this name is a key
            elif step in values:
                key, node = values[step]
                line, path = key.start_mark.line + 1, _joined(path, step)
            elif missing and number == len(location) - 1:
                path = _joined(path, step)
        return line, path

    def _invalid(self, error: ValidationError, model: type[BaseModel]) -> ConfigFileError:
        """Return the first complaint with its place, and as much of the others as a line holds."""
        reasons: dict[tuple[int | None, str], dict[str, None]] = {}
        for fault in error.errors(include_url=False, include_input=False):
            place = self._place(fault["loc"], missing=fault["type"] == MISSING)
            reasons.setdefault(place, {})[reason_for(fault, model)] = None
        (place, first), *others = ((place, ", or ".join(each)) for place, each in reasons.items())
        more = [f"{_shown(*place)}: {reason}" for place, reason in others]
        return self._fail(*place, _together(first, more))


def _values(node: yaml.Node | None) -> dict[str, tuple[yaml.Node, yaml.Node]]:
    if not isinstance(node, yaml.MappingNode):
        return {}
    return {str(key.value): (key, value) for key, value in node.value}


def _joined(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _shown(line: int | None, key: str) -> str:
    return ", ".join(filter(None, ("" if line is None else f"line {line}", key)))


def _together(first: str, others: Iterable[str]) -> str:
    words, n_left = first, 0
    for other in others:
        if n_left or len(words) + len(other) > _LONGEST - 20:
            n_left += 1
        else:
            words += f"; {other}"
    return f"{words}; and {n_left} more" if n_left else words
