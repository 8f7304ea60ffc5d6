"""The runner of decode steps; what Genie hands its sampler is tested on a virtual device."""

import io
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from device_scripts import genie_logits

if TYPE_CHECKING:
    from device_scripts import genie_api
else:
    import genie_api


def test_windows_are_read(tmp_path: Path) -> None:
    path = tmp_path / "windows"
    path.write_text('[{"prompt": [1, 2], "following": [3]}]')
    assert genie_logits.read_windows(str(path)) == [([1, 2], [3])]


@pytest.mark.parametrize(
    "content",
    ["", "[", "[]", "{}", "[1]", '[{"prompt": [1]}]', '[{"prompt": [], "following": [1]}]',
     '[{"prompt": [1], "following": []}]', '[{"prompt": [-1], "following": [1]}]',
     '[{"prompt": [1], "following": ["a"]}]', '[{"prompt": 1, "following": [1]}]'],
)  # fmt: skip
def test_other_windows_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "windows").write_text(content)
    with pytest.raises(genie_api.FatalError, match=r"holds no windows|no token ids|empty window"):
        genie_logits.read_windows(str(tmp_path / "windows"))


def test_the_sampler_keeps_the_logits_and_goes_on_with_the_text() -> None:
    sink = io.BytesIO()
    steps = genie_logits.LogitsSampler(sink)
    for text in ([7, 8], [9]):
        steps.follow(text)
        answers = [steps(b"1234") for _ in (*text, "once more")]
        assert answers == [*text, text[-1]]
        assert steps.done == len(text)
    assert sink.getvalue() == b"1234" * 3


def test_steps_of_another_size_are_refused() -> None:
    steps = genie_logits.LogitsSampler(io.BytesIO())
    steps.follow([1, 2])
    steps(b"1234")
    with pytest.raises(genie_api.FatalError, match="8 bytes of logits, the one before 4"):
        steps(b"12345678")
