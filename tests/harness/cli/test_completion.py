"""Tab: what the shells are offered, and bash itself."""

import pytest

from tests.harness.cli.conftest import Run


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("ben", ["bench"]),
        ("help perp", ["perplexity"]),
        ("pool undr", ["undrain"]),
        ("gate --baselin", ["--baseline"]),
        ("gate --metric prefill_tok", ["prefill_tokens_per_s"]),
        ("build m --recipe w4a16-m", ["w4a16-mixed"]),
        ("build m --target SM875", ["SM8750", "SM8750:emulator"]),
        ("build m --target SM8750 : em", ["emulator"]),
        ("build m --target SM8750 : emulator --rec", ["--recipe"]),
        pytest.param(
            "device start n --soc SM845",
            ["SM8450"],
            marks=pytest.mark.needs("plugins.virtual_android"),
        ),
        ("inspect no", []),
    ],
)
def test_what_tab_offers(qnnfarm: Run, line: str, offered: list[str]) -> None:
    """bash gives words apart at colons."""
    words = ["qnnfarm", *line.split()]
    variables = {
        "_QNNFARM_COMPLETE": "complete_bash",
        "_QNNFARM_COMPLETE_BEFORE": "",
        "COMP_WORDS": "\n".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    done = qnnfarm(**variables)
    assert done.stdout.split() == offered
    assert not done.stderr
