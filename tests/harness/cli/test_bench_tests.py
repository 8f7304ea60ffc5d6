"""llama-bench's options, and what they become."""

import pytest

from harness.cli.bench_options import parse_labels
from harness.cli.bench_tests import BenchTest, LlamaBenchOptions
from harness.errors import WrongUseError


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [(64, 16, 0)]),
        ({"p": ["64", "128"], "n": ["8,16"]},
         [(64, 8, 0), (64, 16, 0), (128, 8, 0), (128, 16, 0)]),
        ({"n": ["0"]}, [(64, 1, 0)]),
        ({"p": ["0"]}, [(2, 16, 0)]),
        ({"p": ["0,64"], "n": ["0,16"]}, [(2, 16, 0), (64, 1, 0), (64, 16, 0)]),
        ({"d": ["0,64"], "n": ["8"]}, [(2, 8, 0), (64, 8, 0)]),
        ({"p": ["0"], "d": ["32"]}, [(32, 16, 0)]),
        ({"pg": ["64,16"], "p": ["128"]}, [(64, 16, 0), (128, 16, 0)]),
        ({"pg": ["64,16"], "p": ["64,32"]}, [(64, 16, 0), (32, 16, 0)]),
        ({"p": ["32,64"], "d": ["128"]}, [(32, 1, 128), (64, 1, 128), (128, 16, 0)]),
        ({"p": ["32"], "n": ["0"], "d": ["64,128"]}, [(32, 1, 64), (32, 1, 128)]),
        ({"p": ["32"], "n": ["8"], "d": ["0,64"]}, [(32, 8, 0), (32, 1, 64), (64, 8, 0)]),
        ({"pg": ["32,8"], "d": ["64"], "n": ["0"], "p": ["16"]}, [(32, 8, 64), (16, 1, 64)]),
    ],
    ids=str,
)  # fmt: skip
def test_lists_give_every_pair_once_and_a_depth_before_it(
    options: dict[str, list[str]], expected: list[tuple[int, int, int]]
) -> None:
    found = LlamaBenchOptions(*(options.get(key) for key in ("p", "n", "pg", "d"))).tests()
    assert [(test.prompt_tokens, test.new_tokens, test.depth) for test in found] == expected


def test_only_a_pair_asks_for_the_speed_of_both_together() -> None:
    assert LlamaBenchOptions(["64"], both=["64,16"]).tests() == (BenchTest(64, 16, together=True),)
    assert LlamaBenchOptions(["64"]).tests() == (BenchTest(64, 16),)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"p": ["0"], "n": ["0"]}, "-p 0 -n 0 measures nothing"),
        ({"n": ["0"], "d": ["32"]}, "-d 32 -n 0 measures nothing: a depth is that of -p or -n"),
        ({"p": ["64;128"]}, "-p: '64;128' is not a number of tokens"),
        ({"n": ["-1"]}, "-n: '-1' is not a number"),
        ({"pg": ["64"]}, "-pg: '64' is no pair"),
        ({"pg": ["0,16"]}, "-pg: '0,16' is no pair"),
        ({"p": [",".join(map(str, range(2, 1500)))]}, "1,498 tests are too many"),
    ],
    ids=str,
)
def test_tests_that_genie_cannot_run_are_refused(options: dict[str, list[str]], said: str) -> None:
    with pytest.raises(WrongUseError) as caught:
        LlamaBenchOptions(*(options.get(key) for key in ("p", "n", "pg", "d"))).tests()
    assert str(caught.value).startswith(said)


def test_labels_are_pairs() -> None:
    assert parse_labels(["team=camera", "build=a=b"]) == {"team": "camera", "build": "a=b"}
    for texts in (["team"], ["=x"], ["a b=x"], ["team="], ["team=x\ny"], ["team=a", "team=b"]):
        with pytest.raises(WrongUseError, match="--label"):
            parse_labels(texts)
