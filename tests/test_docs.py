"""Documents name files that exist and are wrapped; docstrings begin plainly."""

import re
from pathlib import Path

from tools.commands import BUILDER, builder

_ROOT = Path(__file__).parents[1]
_DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "benchmarks/*.md", "device_scripts/*.md", "plugins/*/*.md")
    for path in _ROOT.glob(pattern)
)
_FILE = re.compile(
    r"(?<![\w./{-])(?:buildlib|device_scripts|harness|plugins|reports|suites|tests|tools|docs|benchmarks)"
    r"(?:/[\w-]+)*(?:/[\w.-]+\.(?:py|sh|md|yaml)|/)(?![\w*])"
)
_OF_PLUGIN = re.compile(r"(?:tests/)?(plugins/\w+)/")
"""A file of a plugin, which the checkout may be without."""
_LONGEST_LINE = 100
_PACKAGES = ("buildlib", "device_scripts", "harness", "plugins", "reports", "suites")
_CLAUSE = re.compile(
    r'(?:\A|:\n)\s*r?"""(?:What|How|Where|Whether|When|Who|Whose|Those|Everything|Something)\b.*'
)
"""A docstring that begins with a clause, where its first line is a noun phrase or an imperative."""


def test_every_file_that_a_document_names_exists() -> None:
    named = {
        f"{path.name}: {name}": _ROOT / name
        for path in _DOCUMENTS
        for name in _FILE.findall(path.read_text(encoding="utf-8"))
        if not (found := _OF_PLUGIN.match(name)) or (_ROOT / found[1]).exists()
    }
    assert sorted(name for name, path in named.items() if not path.exists()) == []


def test_prose_is_wrapped() -> None:
    for path in _DOCUMENTS:
        text = re.sub(r"(?ms)^ *```.*?^ *```", "", path.read_text(encoding="utf-8"))
        prose = [line for line in text.splitlines() if not line.startswith(("|", "#", "    ", "<"))]
        assert [line for line in prose if len(line) > _LONGEST_LINE] == [], path


def test_the_table_of_keys_without_an_effect_is_as_declared() -> None:
    """`python -m tools.commands` writes it."""
    assert BUILDER.read_text(encoding="utf-8") == builder()


def test_no_docstring_begins_with_a_clause() -> None:
    paths = (path for package in _PACKAGES for path in (_ROOT / package).rglob("*.py"))
    assert [
        f"{path}: {found}"
        for path in paths
        for found in _CLAUSE.findall(path.read_text(encoding="utf-8"))
    ] == []
