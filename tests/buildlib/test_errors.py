"""Every error of the build library crosses processes, and stands in the tree."""

import pytest

from buildlib import errors
from buildlib.errors import BuildError
from tests.error_samples import all_errors, survives_pickling


@pytest.mark.parametrize("kind", all_errors(BuildError), ids=lambda kind: kind.__name__)
def test_it_survives_pickling(kind: type[BuildError]) -> None:
    assert survives_pickling(kind)
    assert kind.exit_code in {1, 2}


def test_the_tree_is_that_of_the_classes() -> None:
    def lines(kind: type[BuildError], lead: str) -> list[str]:
        below = [k for k in kind.__subclasses__() if k.__module__ == errors.__name__]
        found = []
        for number, child in enumerate(below, start=1):
            last = number == len(below)
            found.append(f"{lead}{'└' if last else '├'}── {child.__name__}")
            found += lines(child, lead + ("    " if last else "│   "))
        return found

    drawn = [line for line in (errors.__doc__ or "").splitlines() if "── " in line]
    assert {line.strip(" │├└─") for line in drawn} == {
        kind.__name__ for kind in all_errors(BuildError) if kind is not BuildError
    }
    by_name = {line.strip(" │├└─"): line.index("─") for line in drawn}
    for line in lines(BuildError, "    "):
        assert by_name[line.strip(" │├└─")] == line.index("─"), line
