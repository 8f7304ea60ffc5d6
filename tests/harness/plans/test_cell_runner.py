"""A plan's results database is made when there is something to keep."""

from contextlib import closing
from pathlib import Path

import pytest

from harness.errors import NotAStoreError
from harness.plans.cell_runner import ResultsLater


@pytest.mark.parametrize("form", ["{}", "sqlite:///{}"])
def test_it_is_made_when_it_is_written_to(tmp_path: Path, form: str) -> None:
    path = tmp_path / "results.db"
    with closing(ResultsLater(form.format(path))) as later:
        before = later.location
        assert later.there is None
        assert not path.exists()
        assert later.made() is later.made()
        assert later.there is not None
        assert path.exists()
        assert later.location == before  # the journal of the plan goes by it
    with closing(ResultsLater(form.format(path))) as again:
        assert again.there is not None
        assert again.location == before


def test_what_is_no_database_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    path.write_text("notes of mine")
    with pytest.raises(NotAStoreError):
        ResultsLater(str(path))
