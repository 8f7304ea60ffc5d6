"""A plan's results database is made when there is something to keep."""

from contextlib import closing
from pathlib import Path

import pytest

from harness.errors import StoreUnavailableError
from harness.results.store import LazyResultsStore


@pytest.mark.parametrize("form", ["{}", "sqlite:///{}"])
def test_it_is_made_when_it_is_written_to(tmp_path: Path, form: str) -> None:
    path = tmp_path / "results.db"
    with closing(LazyResultsStore(form.format(path))) as store:
        before = store.location
        assert store.existing is None
        assert not path.exists()
        assert store.open() is store.open()
        assert store.existing is not None
        assert path.exists()
        assert store.location == before  # the journal of the plan goes by it
    with closing(LazyResultsStore(form.format(path))) as again:
        assert again.existing is not None
        assert again.location == before


def test_an_invalid_database_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    path.write_text("notes of mine")
    with pytest.raises(StoreUnavailableError):
        LazyResultsStore(str(path))
