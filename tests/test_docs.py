"""The documents name files that exist, and are wrapped."""

import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "benchmarks/*.md", "device_scripts/*.md")
    for path in _ROOT.glob(pattern)
)
_FILE = re.compile(
    r"(?<![\w./{-])(?:buildlib|device_scripts|harness|reports|suites|tests|tools|docs|benchmarks)"
    r"(?:/[\w-]+)*(?:/[\w.-]+\.(?:py|sh|md|yaml)|/)(?![\w*])"
)
_LONGEST_LINE = 100


@pytest.mark.parametrize("path", _DOCUMENTS, ids=lambda path: path.name)
def test_every_file_that_a_document_names_exists(path: Path) -> None:
    named = set(_FILE.findall(path.read_text(encoding="utf-8")))
    assert sorted(name for name in named if not (_ROOT / name).exists()) == []


@pytest.mark.parametrize("path", _DOCUMENTS, ids=lambda path: path.name)
def test_prose_is_wrapped(path: Path) -> None:
    text = re.sub(r"(?ms)^ *```.*?^ *```", "", path.read_text(encoding="utf-8"))
    prose = [line for line in text.splitlines() if not line.startswith(("|", "#", "    ", "<"))]
    assert [line for line in prose if len(line) > _LONGEST_LINE] == []
