"""What a model is calibrated on where nobody gives a text."""

from pathlib import Path

import pytest

from buildlib.builder.calibration_text import default_text
from buildlib.builder.sources import find_source
from buildlib.container.chat_template import ChatTemplate
from buildlib.errors import ModelWarning
from tests.buildlib.model_folders import copy_of_export

CHATML = (
    "{{ bos_token }}{{ strftime_now('%Y') }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "<|end|>\n{% endfor %}"
)
ALTERNATE = "{% if messages|length > 2 %}{{ raise_exception('one turn') }}{% endif %}"


def test_conversations_are_the_models_own_and_the_text_is_the_same_every_year() -> None:
    template = ChatTemplate(CHATML, (("bos_token", "<s>"),))
    text = default_text(template, Path())
    assert text.count("2026<|user|>") == 30  # conversations
    assert text.count("<|user|>") == text.count("<|assistant|>") > 30
    assert "<s>" not in text  # nothing begins there
    assert default_text(template, Path()) == text


@pytest.mark.parametrize("template", [None, ChatTemplate(ALTERNATE, ())])
def test_without_a_template_that_takes_them_conversations_are_plain(
    template: ChatTemplate | None,
) -> None:
    text = default_text(template, Path())
    assert '\n\nUser: What\'s the difference between "affect" and "effect"?\nAssistant: ' in text
    assert 48 << 10 < len(text.encode()) < 80 << 10


def test_any_part_of_the_text_has_all_kinds() -> None:
    text = default_text(None, Path())
    for start in range(0, len(text) - 6000, 2000):
        part = text[start : start + 6000]  # less than 2048 tokens
        assert all(kind in part for kind in (" the ", "User: ", "\n    ")), start
        assert any("\u0370" < letter < "\u2000" or letter > "\u3000" for letter in part), start


def test_a_remark_says_whose_text_it_was(tiny: Path) -> None:
    with pytest.warns(ModelWarning, match=f"^{tiny.name}: .*the text that comes with qnnfarm"):
        source = find_source(tiny, None)
    assert source.texts() == {"text/calibration.txt": default_text(None, tiny)}


def test_an_onnx_without_encodings_gets_the_default_text(tmp_path: Path) -> None:
    export = copy_of_export("dynamo-llama", tmp_path / "export", text=False)
    encodings = export / "model.encodings"
    encodings.unlink(missing_ok=True)
    assert find_source(export, None, calibrates=False).calibration_text is None
    with pytest.warns(ModelWarning, match=r"^export: "):
        assert find_source(export, None).calibration_text == default_text(None, Path())
    encodings.write_text("{}")
    assert find_source(export, None).calibration_text is None  # they are to cover it


@pytest.mark.filterwarnings("error")
def test_own_text_comes_first(tmp_path: Path) -> None:
    export = copy_of_export("torchscript-llama", tmp_path / "export")
    own = (export / "text" / "calibration.txt").read_text()
    assert find_source(export, None).calibration_text == own
    assert find_source(export, "given").calibration_text == "given"
