"""SHA-256 of the code behind a stage: its modules, and what they import of ours and of plugins.

Imports are found in the text of the sources, those inside functions too. Parsing the sources would
take ten times as long, which is felt when a build has nothing else to do; the tests compare both.
A module that is run as a child process counts as imported: it is named by a string. A JSON file of
the same name as a module is part of it.
"""

import functools
import hashlib
import re
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import buildlib
from buildlib.entry_points import plugin_code

_TYPING_ONLY = re.compile(r"^if TYPE_CHECKING:.*\n(?:[ \t]+.*\n|\n)+", re.MULTILINE)
_IMPORT = re.compile(
    r"""^[ \t]*(?:
        from[ ](?P<package>[\w.]+)[ ]import[ ](?P<names>\([^)]*\)|.*)
        | import[ ](?P<module>[\w.]+)
    )""",
    re.MULTILINE | re.VERBOSE,
)
_NAME = re.compile(r"\w+")


class CodeDigest:
    """Digests of the modules of packages; each source is read once, and threads share them."""

    def __init__(self, *packages: Path) -> None:
        """Digest modules of these packages.

        Args:
            packages: folder of each, or its file if it is a single module.
        """
        self._packages = packages
        names = "|".join(package.stem for package in packages)
        self._named = re.compile(rf'"((?:{names})(?:\.\w+)+)"')
        self._lock = threading.Lock()
        self._sources: dict[str, tuple[str, frozenset[str]]] = {}
        self._digests: dict[tuple[str, ...], str] = {}

    def of(self, *modules: str) -> str:
        """Compute the SHA-256 in hex over the sources of `modules` and all that they import.

        A module outside the packages adds nothing: versions stand for the code of others.
        """
        with self._lock:
            if modules not in self._digests:
                lines = (f"{name}\0{self._sources[name][0]}" for name in self._closure(modules))
                self._digests[modules] = hashlib.sha256("\n".join(lines).encode()).hexdigest()
            return self._digests[modules]

    def imports(self, module: str) -> frozenset[str]:
        """Return modules of the packages that a module imports itself, with parent packages."""
        return self._source(module)[1]

    def _closure(self, modules: Iterable[str]) -> list[str]:
        queue = [module for name in modules for module in self._with_parents(name)]
        reached: set[str] = set()
        while queue:
            module = queue.pop()
            if module not in reached:
                reached.add(module)
                queue.extend(self._source(module)[1])
        return sorted(reached)

    def _source(self, module: str) -> tuple[str, frozenset[str]]:
        if module not in self._sources:
            path = self._paths.get(module)
            data = path.read_bytes() if path is not None else b""
            text = _TYPING_ONLY.sub("", data.decode())
            if path is not None and (table := path.with_suffix(".json")).is_file():
                data += table.read_bytes()
            imports = frozenset(self._imports_in(text)) - {module}
            self._sources[module] = hashlib.sha256(data).hexdigest(), imports
        return self._sources[module]

    def _imports_in(self, text: str) -> Iterator[str]:
        for match in _IMPORT.finditer(text):
            if match["module"]:
                yield from self._with_parents(match["module"])
                continue
            yield from self._with_parents(match["package"])
            for name in _NAME.findall(match["names"]):
                yield from self._with_parents(f"{match['package']}.{name}")
        for match in self._named.finditer(text):
            yield from self._with_parents(match[1])

    def _with_parents(self, module: str) -> Iterator[str]:
        """Return a module of the packages with its parent packages; none for other names."""
        if module not in self._paths:
            return
        words = module.split(".")
        for length in range(1, len(words) + 1):
            yield ".".join(words[:length])

    @functools.cached_property
    def _paths(self) -> dict[str, Path]:
        """Sources by module: one walk costs less than a look at the disk for each name."""
        paths = {}
        for package in self._packages:
            for path in (package,) if package.is_file() else package.rglob("*.py"):
                words = path.relative_to(package.parent).with_suffix("").parts
                paths[".".join(words[:-1] if words[-1] == "__init__" else words)] = path
        return paths


@functools.cache
def own_code() -> CodeDigest:
    """Return the digest of this project and its plugins, as this process first read them."""
    return CodeDigest(Path(buildlib.__file__).parent, *plugin_code())
