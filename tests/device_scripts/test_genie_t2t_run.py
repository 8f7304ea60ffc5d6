import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_scripts import genie_t2t_run

if TYPE_CHECKING:
    from device_scripts import genie_api
else:
    import genie_api


class Pieces:
    """A dialog that answers with given pieces, as Genie's callback hands them out."""

    def __init__(self, pieces: list[bytes], status: int = 0) -> None:
        self.pieces = pieces
        self.status = status

    def query(self, prompt: bytes, sink: Callable[[bytes], None], *, rewind: bool) -> int:
        assert prompt
        assert not rewind
        for piece in self.pieces:
            sink(piece)
        return self.status

    def token_query(self, tokens: list[int], sink: Callable[[list[int]], None]) -> int:
        for token in tokens:
            sink([token, token + 1])
        return self.status


class CountedFlushes(io.BytesIO):
    flushes = 0

    def flush(self) -> None:
        self.flushes += 1


def printed(action: Callable[[], None]) -> CountedFlushes:
    stream = CountedFlushes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", SimpleNamespace(buffer=stream))
        action()
    return stream


@given(st.text(min_size=1), st.data())
def test_text_is_byte_exact_however_it_is_cut(text: str, data: st.DataObject) -> None:
    whole = text.encode(errors="surrogatepass")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)))))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    out = printed(lambda: genie_t2t_run.ask(Pieces(pieces), b"the prompt"))  # type: ignore[arg-type]
    assert out.getvalue() == b"[PROMPT]: the prompt\n\n[BEGIN]: " + whole + b"[END]\n\n"
    assert out.flushes >= len(pieces)


def test_token_ids_are_separated_once() -> None:
    out = printed(lambda: genie_t2t_run.ask_tokens(Pieces([]), [5, 70]))  # type: ignore[arg-type]
    assert out.getvalue() == b"[PROMPT]: 5 70\n\n[BEGIN]: 5 6 70 71[END]\n\n"


def test_a_context_is_filled_by_a_query_that_generates_nothing() -> None:
    said: list[object] = []

    class Dialog:
        def set_max_tokens(self, count: int) -> None:
            said.append(count)

        def token_query(self, tokens: list[int], sink: Callable[[list[int]], None]) -> int:
            sink([])
            said.append(tokens)
            return 0

    out = printed(lambda: genie_t2t_run.fill_context(Dialog(), [1, 2], 7))  # type: ignore[arg-type]
    assert said == [0, [1, 2], 7]
    assert out.getvalue() == b""


@pytest.mark.parametrize(
    ("config", "most"),
    [
        (b'{"dialog": {"max-num-tokens": 5, "context": {"size": 192}}}', 5),
        (b'{"dialog": {"context": {"size": 192}}}', 192),
    ],
)
def test_what_later_queries_may_generate(config: bytes, most: int) -> None:
    assert genie_t2t_run.answer_bound(config) == most


def test_a_full_context_fails_only_without_text(capsys: pytest.CaptureFixture[str]) -> None:
    genie_t2t_run.check_status(4, generated=True)
    assert "GENIE_STATUS_WARNING_CONTEXT_EXCEEDED (4)" in capsys.readouterr().err
    with pytest.raises(genie_api.GenieError, match="the prompt exceeds the context"):
        genie_t2t_run.check_status(4, generated=False)


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1), st.sampled_from([" ", "\n", "\t \r\n"]))
def test_tokens_are_read(tokens: list[int], separator: str) -> None:
    assert genie_t2t_run.parse_tokens(separator.join(map(str, tokens)).encode()) == tokens


@pytest.mark.parametrize(
    "text", [b"", b" \n", b"1 x", b"-1", b"1.5", b"2147483648", b"\xff", b"1\x002", "٣".encode()]
)
def test_invalid_token_ids_are_refused(text: bytes) -> None:
    with pytest.raises(genie_api.FatalError):
        genie_t2t_run.parse_tokens(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", "x"], "the following arguments are required: -c/--config"),
        (["-c", "f"], "one of the arguments"),
        (["-c", "f", "-p", "x", "--prompt_file", "g"], "not allowed with argument"),
        (["-c", "f", "-tok", "t", "-w", "x"], "-w: goes with a prompt"),
        (["-c", "f", "-e", "e.raw", "-p", "x"], "not allowed with argument"),
        (["-c", "f", "-e", "e.raw,int9,1,0"], "invalid"),
        (["-c", "f", "-p", "x", "-t", "l"], "-t/--embedding_table: goes with -e/--embedding_file"),
        (["-c", "f", "-p", "x", "-l", "a,b"], "invalid"),
        (["-c", "f", "-p", "x", "--log", "loud"], "invalid choice"),
        (["-c", "f", "-p", "x", "--prof", "y"], "unrecognized arguments"),
    ],
)
def test_wrong_use_ends_with_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        genie_t2t_run.main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_bound_of_ours_cuts_what_genie_does_not() -> None:
    """Lade dialogs ignore max-num-tokens: what comes after so many pieces is not printed."""
    config = b'{"dialog": {"type": "%s", "max-num-tokens": 2}}'
    assert genie_t2t_run.token_bound(config % b"lade") == 2
    assert genie_t2t_run.token_bound(config % b"basic") == 0
    assert genie_t2t_run.token_bound(b"nonsense") == 0
    clock = genie_t2t_run.TokenClock(most=2)
    dialog = Pieces([b"a", b"b", b"c"])
    out = printed(lambda: genie_t2t_run.ask(dialog, b"x", clock=clock))  # type: ignore[arg-type]
    assert out.getvalue().endswith(b"[BEGIN]: ab[END]\n\n")
    assert len(json.loads(clock.json())["pieces"]) == 2


def test_lora_is_split() -> None:
    options = genie_t2t_run.parser().parse_args(["-c", "f", "-p", "x", "--lora", "lora1,alpha,0.5"])
    assert options.lora == ("lora1", "alpha", 0.5)


def test_files_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "zero").write_bytes(b"a\0b")
    (tmp_path / "tokens").write_bytes(b"nonsense")
    for arguments in (
        ["--prompt_file", "/nonexistent"],
        ["--prompt_file", str(tmp_path / "zero")],
        ["-tok", str(tmp_path / "tokens")],
        ["-p", "x"],
    ):
        assert genie_t2t_run.main(["-c", str(tmp_path / "missing"), *arguments]) == 1
        error = capsys.readouterr().err
        assert error.startswith("genie-t2t-run: error: ")
        assert error.count("\n") == 1
