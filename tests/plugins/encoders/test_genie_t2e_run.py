"""The runner of text encoders; what Genie makes of texts is tested on a virtual device."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from plugins.encoders.on_device import genie_t2e_run

if TYPE_CHECKING:
    from device_scripts import genie_api
else:
    import genie_api


def prompts(*arguments: str) -> list[bytes]:
    return genie_t2e_run.read_prompts(
        genie_t2e_run.parser().parse_args(["-c", "config.json", *arguments])
    )


def test_a_text_comes_from_the_command_line_a_file_or_a_file_of_many(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("one\ntext")
    (tmp_path / "many").write_text('["a", "two\\nlines", "\\u00e9"]')
    assert prompts("-p", "a text") == [b"a text"]
    assert prompts("--prompt_file", str(tmp_path / "one")) == [b"one\ntext"]
    assert prompts("--prompts_file", str(tmp_path / "many")) == [b"a", b"two\nlines", b"\xc3\xa9"]


@pytest.mark.parametrize("content", ["", "[", "[]", "{}", "[1]", '"a"', "[" * 9000, '["\\u0000"]'])
def test_other_files_of_prompts_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "prompts").write_text(content)
    with pytest.raises(genie_api.FatalError, match=r"no JSON|zero byte"):
        prompts("--prompts_file", str(tmp_path / "prompts"))


def test_one_text_source_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ((), ("-p", "a", "--prompt_file", "b")):
        with pytest.raises(SystemExit) as ended:
            prompts(*arguments)
        assert ended.value.code == 2
    assert "not allowed with argument" in capsys.readouterr().err


def test_each_text_is_written_before_the_next() -> None:
    vectors = [genie_api.Vectors((1, 2), b"12345678"), genie_api.Vectors((2, 1), b"abcdefgh")]
    output, summary = io.BytesIO(), io.BytesIO()
    written = []

    def generate(_text: bytes) -> genie_api.Vectors:
        written.append((output.getvalue(), summary.getvalue().count(b"\n")))
        return vectors.pop(0)

    embedding = cast("genie_api.EmbeddingHandle", SimpleNamespace(generate=generate))
    shapes = genie_t2e_run.embed(embedding, [b"a", b"b"], output, summary)
    assert written == [(b"", 0), (b"12345678", 1)]
    assert output.getvalue() == b"12345678abcdefgh"
    assert shapes == [(1, 2), (2, 1)]
    lines = [json.loads(line) for line in summary.getvalue().splitlines()]
    assert [line["shape"] for line in lines] == [[1, 2], [2, 1]]
    assert all(line["seconds"] >= 0 for line in lines)
