"""Chat templates, read as transformers reads them and rendered with what it gives them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buildlib.container import template_worker
from buildlib.container.chat_template import TOKENIZER_CONFIG, ChatTemplate, template_files
from buildlib.errors import ContainerError, ModelFileError
from buildlib.toolchains.qnn.refusal import RefusedError

CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = """\
{#- the system message joins the first of the user -#}
{%- set ns = namespace(system='') -%}
{%- if messages[0]['role'] == 'system' -%}
    {%- set ns.system = messages[0]['content'] | trim ~ '\n\n' -%}
    {%- set messages = messages[1:] -%}
{%- endif -%}
{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{- raise_exception('roles must alternate') -}}
    {%- endif -%}
    {%- if message['role'] == 'user' -%}
        {{- '[INST] ' + ns.system + message['content'] + ' [/INST]' -}}
        {%- set ns.system = '' -%}
    {%- else -%}
        {%- generation -%}{{- ' ' + message['content'] + eos_token -}}{%- endgeneration -%}
    {%- endif -%}
{%- endfor -%}
"""
LOOSE = """\
{% macro show(message) %}
  {{ message | tojson(indent=2) }} {{ message.content | length }}
{% endmacro %}
{% for message in messages %}
    {% if loop.index > 4 %}
        {% break %}
    {% endif %}
    {% if not message.content %}
        {% continue %}
    {% endif %}
    {{ show(message) }}{{ messages[loop.index0 - 1].role if not loop.first else pad_token }}
{% endfor %}
{{ 'tools' if tools else 'no tools' }} {{ documents is none }} {{ unknown }}
"""
TEMPLATES = (CHATML, STRICT, LOOSE)
TOKENS = (("bos_token", "<s>"), ("eos_token", "</s>"))
MESSAGES = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"})
FOLDER = Path("folder")


NAMED = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
JINJA, PROCESSOR = {"chat_template.jinja": "file"}, {"chat_template.json": {"chat_template": "p"}}
OLDER = {"special_tokens_map.json": {"bos_token": "<b>"}}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({TOKENIZER_CONFIG: {"eos_token": "</s>"}}, None),
        (
            {
                TOKENIZER_CONFIG: {
                    "chat_template": CHATML,
                    "bos_token": "<s>",
                    "eos_token": {"content": "</s>", "special": True},
                    "pad_token": None,
                }
            },
            ChatTemplate(CHATML, TOKENS),
        ),
        ({TOKENIZER_CONFIG: {"chat_template": NAMED}}, ChatTemplate("d", ())),
        ({TOKENIZER_CONFIG: {"chat_template": NAMED[:1]}}, None),
        (
            {TOKENIZER_CONFIG: {"chat_template": "c"}, **JINJA, **PROCESSOR},
            ChatTemplate("file", ()),
        ),
        (PROCESSOR, ChatTemplate("p", ())),
        (
            {TOKENIZER_CONFIG: {"chat_template": ""}, **OLDER},
            ChatTemplate("", (("bos_token", "<b>"),)),
        ),
        (
            {TOKENIZER_CONFIG: {"chat_template": "", "added_tokens_decoder": {}}, **OLDER},
            ChatTemplate("", ()),
        ),
        *(
            ({TOKENIZER_CONFIG: text}, ModelFileError)
            for text in ("{", "[]", {"chat_template": 1}, {"chat_template": [1]})
        ),
    ],
)
def test_a_template_is_found_where_transformers_looks(
    files: Mapping[str, object], expected: object, tmp_path: Path
) -> None:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / name).write_text(text)
    assert len(template_files(tmp_path)) == len(files)
    if expected is ModelFileError:
        with pytest.raises(ModelFileError):
            ChatTemplate.find(tmp_path)
    else:
        assert ChatTemplate.find(tmp_path) == expected


def test_conversations_become_prompts_in_a_container_as_in_the_model(tmp_path: Path) -> None:
    template = ChatTemplate(CHATML, TOKENS)
    (tmp_path / TOKENIZER_CONFIG).write_text(template.to_json(), encoding="utf-8")
    assert ChatTemplate.find(tmp_path) == template
    hostile = [{"role": "user", "content": "{{ 7 * 7 }}{% raw %}"}]
    text, never_a_template = template.render([MESSAGES, hostile], tmp_path)
    assert text == (
        "<s><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert "{{ 7 * 7 }}{% raw %}<|im_end|>" in never_a_template


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{{ raise_exception('no system') }}", "no system"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ x.y }}", "'x' is undefined"),
        ("{% if %}", "line 1"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ 'a' * 30000000 }}", "more than"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested"),
    ],
)
def test_hostile_templates_are_refused(text: str, reason: str) -> None:
    request = {"template": text, "special_tokens": {}, "conversations": [MESSAGES]}
    with pytest.raises(RefusedError, match=reason):
        template_worker.render(json.dumps(request | {"add_generation_prompt": True}).encode())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{{ x.y }}", "'x' is undefined"),
        ("{{ 'a' * 10**10 }}", "memory"),
        ("{{ '\ud800' }}", "UTF-8"),
    ],
)
def test_a_refusal_is_one_line(text: str, reason: str) -> None:
    with pytest.raises(ContainerError) as caught:
        ChatTemplate(text, ()).render([MESSAGES], FOLDER)
    said = str(caught.value)
    assert said.startswith("container folder: its chat template: ")
    assert reason in said
    assert "\n" not in said


def test_a_template_without_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buildlib.container.chat_template._TIMEOUT_S", 1.0)
    loop = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
    with pytest.raises(ContainerError, match="no end after 1 s"):
        ChatTemplate(loop, ()).render([MESSAGES], FOLDER)


CONTENTS = st.text(max_size=20).filter(lambda text: text.isprintable()) | st.sampled_from(
    ["", "  spaces  ", "\n\n", "{{ 1 }}", "日本語 e\u0301 🎉", "</s>", "<s>", '"a" & <b>']
)
CONVERSATIONS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": CONTENTS}
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.needs("transformers")
@settings(max_examples=20, deadline=None)
@given(st.lists(CONVERSATIONS, min_size=5, max_size=5), st.booleans())
def test_texts_are_those_of_transformers(
    conversations: Sequence[Sequence[dict[str, str]]], prompts: bool
) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    def theirs(text: str, messages: Sequence[dict[str, str]]) -> str | None:
        try:
            [rendered], _ = render_jinja_template(
                [messages], chat_template=text, add_generation_prompt=prompts, **dict(TOKENS)
            )
        except Exception:  # noqa: BLE001  (of jinja2)
            return None
        return str(rendered)

    def ours(text: str, messages: Sequence[Mapping[str, str]]) -> str | None:
        try:
            (rendered,) = ChatTemplate(text, TOKENS).render(
                [messages], FOLDER, add_generation_prompt=prompts
            )
        except ContainerError:
            return None
        return rendered

    for text in TEMPLATES:
        for messages in conversations:
            assert ours(text, messages) == theirs(text, messages)
