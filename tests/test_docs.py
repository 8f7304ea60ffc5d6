"""Documents name files that exist and are wrapped; docstrings begin plainly."""

import re
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("path", _DOCUMENTS, ids=lambda path: path.name)
def test_every_file_that_a_document_names_exists(path: Path) -> None:
    named = {
        name
        for name in _FILE.findall(path.read_text(encoding="utf-8"))
        if not (found := _OF_PLUGIN.match(name)) or (_ROOT / found[1]).exists()
    }
    assert sorted(name for name in named if not (_ROOT / name).exists()) == []


@pytest.mark.parametrize("path", _DOCUMENTS, ids=lambda path: path.name)
def test_prose_is_wrapped(path: Path) -> None:
    text = re.sub(r"(?ms)^ *```.*?^ *```", "", path.read_text(encoding="utf-8"))
    prose = [line for line in text.splitlines() if not line.startswith(("|", "#", "    ", "<"))]
    assert [line for line in prose if len(line) > _LONGEST_LINE] == []


def test_the_table_of_keys_without_an_effect_is_as_declared() -> None:
    """`python -m tools.commands` writes it."""
    assert BUILDER.read_text(encoding="utf-8") == builder()


@pytest.mark.parametrize("package", _PACKAGES)
def test_no_docstring_begins_with_a_clause(package: str) -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in (_ROOT / package).rglob("*.py")}
    assert [
        f"{path}: {found}" for path in sources for found in _CLAUSE.findall(sources[path])
    ] == []
