"""Chats: the ids of a container's template, and what a dialog on a device makes of them."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from buildlib.container.chat_template import TOKENIZER_CONFIG
from buildlib.container.container import GenAIContainer
from buildlib.container.writer import ContainerFile
from buildlib.errors import ContainerError
from harness.devices.device import Device
from harness.errors import WrongUseError
from harness.runtimes.base import Framing, Generates, GenerationRequest
from harness.runtimes.genie.runtime import GenieModel
from harness.runtimes.tokenizer import encode, load_tokenizer
from harness.workloads.chat import Chat
from harness.workloads.dialog import Dialog
from harness.workloads.generate import Generate
from harness.workloads.session import Session
from suites.models import tiny_llama
from tests.repackaged import repackage

BOS, EOS = 0, 1
SPOKEN = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{{ eos_token }}"
    "{% else %}{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}"
)
TEMPLATE = "{{ bos_token }}" + SPOKEN
TRIMMING = TEMPLATE.replace("m.content }}{{ eos", "m.content | trim }}{{ eos")
ENDLESS = TEMPLATE.replace("{{ eos_token }}", "\n")
PROMPTS = ("In the beginning", "And God said", "Go on")
MakeFolder = Callable[[str], Path]


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    def make(template: str) -> Path:
        shutil.copy(tiny_llama.folder() / "tokenizer.json", tmp_path)
        config = json.loads((tiny_llama.folder() / TOKENIZER_CONFIG).read_text())
        (tmp_path / TOKENIZER_CONFIG).write_text(json.dumps(config | {"chat_template": template}))
        return tmp_path

    return make


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(encode(load_tokenizer(tiny_llama.folder() / "tokenizer.json"), text))


def test_the_first_turn_is_the_rendered_text_with_one_bos(make_folder: MakeFolder) -> None:
    turns = Chat.of(make_folder(TEMPLATE)).turns(["Hi"], "Be brief.")
    assert turns.ids == ((BOS, *ids_of("system: Be brief.\nuser: Hi\n")),)
    assert turns.end_token == EOS
    assert Chat.of(make_folder(SPOKEN)).turns(["Hi"]).ids == (ids_of("user: Hi\n"),)


def test_a_later_turn_is_what_the_template_appends_after_the_end_of_an_answer(
    make_folder: MakeFolder,
) -> None:
    chat = Chat.of(make_folder(TEMPLATE))
    turns = chat.turns(PROMPTS, "Be brief.")
    first, *later = turns.ids
    assert first == (BOS, *ids_of("system: Be brief.\nuser: In the beginning\n"))
    assert later == [ids_of("user: And God said\n"), ids_of("user: Go on\n")]
    answers = [ids_of(" God created"), (*ids_of(" Let there be light"), EOS)]
    assert chat.difference(turns, answers, EOS) is None
    told = chat.difference(turns, answers, 5)
    assert told is not None
    assert "differs from the chat template from token" in told
    endless = Chat.of(make_folder(ENDLESS)).turns(PROMPTS[:2])
    assert endless.end_token is None
    assert endless.ids[1] == ids_of("\nuser: And God said\n")


@pytest.mark.parametrize(
    ("template", "answers"),
    [(TRIMMING, {"God created": True, " God created ": False}), (ENDLESS, {" God created": False})],
)
def test_a_template_that_changes_answers_or_does_not_end_them_is_told(
    make_folder: MakeFolder, template: str, answers: dict[str, bool]
) -> None:
    """What agrees with the template, of answers."""
    chat = Chat.of(make_folder(template))
    turns = chat.turns(PROMPTS[:2])
    for answer, agrees in answers.items():
        assert (chat.difference(turns, [ids_of(answer)], EOS) is None) is agrees


def test_a_template_that_drops_answers_takes_one_prompt(make_folder: MakeFolder) -> None:
    chat = Chat.of(make_folder("{{ messages[-1].content }}"))
    assert chat.turns(["Hi"]).ids == (ids_of("Hi"),)
    with pytest.raises(WrongUseError, match="does not keep an answer"):
        chat.turns(PROMPTS)


def test_a_template_that_refuses_the_conversation_or_is_not_there(make_folder: MakeFolder) -> None:
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    chat = Chat.of(make_folder(refusing + TEMPLATE))
    assert chat.turns(["Hi"]).ids[0][0] == BOS
    with pytest.raises(ContainerError, match="no system"):
        chat.turns(["Hi"], "Be brief.")
    with pytest.raises(WrongUseError, match="has no chat template"):
        Chat.of(tiny_llama.folder())


@pytest.mark.parametrize(
    "fields",
    [
        {"system": "Be brief."},
        {"chat": True, "stop": ("x",)},
        {"chat": True, "restore": "talk"},
        {"chat": True, "rewind": True, "prompt": ("a", "b")},
        {"chat": True, "prompt": None, "tokens": (1, 2)},
    ],
)
def test_what_goes_without_a_chat(fields: dict[str, object]) -> None:
    with pytest.raises(WrongUseError, match="chat"):
        Generate.of(**{"prompt": "Hi", **fields})


@pytest.fixture(scope="module")
def session(
    virtual_device: Device, tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Session]:
    """The reference model with a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    config = json.loads((tiny_llama.folder() / TOKENIZER_CONFIG).read_text())
    path = folder / "config.json"
    path.write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    plain = GenAIContainer.load(tiny_bundle)
    extras = {TOKENIZER_CONFIG: ContainerFile(path, "tokenizer")}
    container = repackage(plain, plain.genie_config, folder / "container", extras)
    with Session(virtual_device, GenieModel(container)) as opened:
        yield opened


def test_the_last_answer_is_that_to_the_ids_of_the_whole_conversation(session: Session) -> None:
    chat = Generate.of(prompt=PROMPTS, chat=True, system="Be brief.", max_tokens=3)
    result = chat.run(session).output
    assert result.chat_difference is None
    text = "system: Be brief.\n"
    for prompt, answer in zip(PROMPTS, (*result.answers[:-1], None), strict=True):
        text += f"user: {prompt}\n" + ("" if answer is None else f"{answer}<|end_of_text|>")
    whole = GenerationRequest(3, token_ids=(BOS, *ids_of(text)), framing=Framing(EOS))
    assert session.require(Generates).generate(whole).text == result.text


@pytest.mark.variant
def test_a_dialog_chats_as_generate_does_in_each_of_its_conversations(session: Session) -> None:
    asked = {"chat": True, "system": "Be brief.", "max_tokens": 6}
    whole = Generate.of(prompt=PROMPTS, **asked).run(session).output
    dialog = Dialog.of(dialogs=(PROMPTS, ("And God said",)), **asked)
    dialog.check(session.model)
    first, second = dialog.run(session).output.answers
    assert first == whole.answers
    assert second == (Generate.of(prompt="And God said", **asked).run(session).output.text,)
    with pytest.raises(WrongUseError, match="leave out `stop`"):
        Dialog.of(dialogs=(PROMPTS,), chat=True, stop=("x",))


def test_a_single_prompt_is_fed_with_one_bos(session: Session) -> None:
    result = Generate.of(prompt="In the beginning", chat=True, max_tokens=2).run(session).output
    raw = Generate.of(prompt="user: In the beginning\n", max_tokens=2).run(session).output
    assert (result.text, result.metrics["prompt_tokens"]) == (
        raw.text,
        raw.metrics["prompt_tokens"],
    )
    assert result.token_ids is None
