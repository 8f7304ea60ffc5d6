"""Embedding files and tables: rows in the encoding of the graph's input."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

if TYPE_CHECKING:
    from device_scripts import genie_api
    from device_scripts.genie_embeddings import (
        EmbeddingFile,
        EmbeddingRows,
        RowEncoding,
        requantize,
    )
else:
    import genie_api
    from genie_embeddings import EmbeddingFile, EmbeddingRows, RowEncoding, requantize

NUMPY: dict[str, np.dtype[np.integer]] = {code: np.dtype(code) for code in "bhBH"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("e.raw", EmbeddingFile("e.raw", None)),
        ("a,b.raw", EmbeddingFile("a,b.raw", None)),
        ("a,b,int8,0.5,-3", EmbeddingFile("a,b", RowEncoding("b", 0.5, -3))),
        ("e.raw,uint16,1e-5,0", EmbeddingFile("e.raw", RowEncoding("H", 1e-5, 0))),
        ("e.raw,float32", EmbeddingFile("e.raw", RowEncoding("f", 1.0, 0))),
    ],
)
def test_the_documented_forms(text: str, expected: EmbeddingFile) -> None:
    assert EmbeddingFile.parse(text) == expected


@given(
    st.sampled_from("bhBH"),
    st.sampled_from("bhBH"),
    st.floats(1e-4, 1.0),
    st.floats(1e-4, 1.0),
    st.integers(-200, 200),
    st.integers(-200, 200),
    st.lists(st.integers(0, 127), min_size=1),
)
def test_requantizing_is_numpys(
    source: str, target: str, scale: float, other: float, offset: int, shift: int, row: list[int]
) -> None:
    values = np.array(row, NUMPY[source])
    done = requantize(
        values.tobytes(), RowEncoding(source, scale, offset), RowEncoding(target, other, shift), {}
    )
    limits = np.iinfo(NUMPY[target])
    real = (values.astype(np.float64) + offset) * scale
    expected = np.clip(np.round(real / other) - shift, limits.min, limits.max)
    assert np.frombuffer(done, NUMPY[target]).tolist() == expected.tolist()


def test_rows_of_a_table(tmp_path: Path) -> None:
    path = tmp_path / "table"
    np.arange(6, dtype=np.uint8).tofile(path)
    table = EmbeddingRows(
        EmbeddingFile(str(path), RowEncoding("B", 0.5, 0)), RowEncoding("H", 0.25, 0)
    )
    assert np.frombuffer(table(1, 6), np.uint16).tolist() == [6, 8, 10]
    assert EmbeddingRows(EmbeddingFile(str(path), None))(2, 2) == bytes([4, 5])
    for token in (2, -1):
        with pytest.raises(genie_api.FatalError, match=f"no row of 3 bytes for token {token}"):
            table(token, 6)
    with pytest.raises(genie_api.FatalError, match="goes with that of the graph's input"):
        EmbeddingRows(EmbeddingFile(str(path), RowEncoding("B", 0.5, 0)))
    with pytest.raises(genie_api.FatalError, match="cannot read the embedding table"):
        EmbeddingRows(EmbeddingFile(str(tmp_path / "none"), None))
