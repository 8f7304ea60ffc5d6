"""Chat template of a model: the Jinja text that makes one prompt of a conversation.

A model folder has it where transformers looks for it: `chat_template.jinja`, else
`additional_chat_templates/`, else `tokenizer_config.json`, else the processor's
`chat_template.json`. A container has it in a `tokenizer_config.json` that holds the template and
the named special tokens alone, so transformers reads a container's folder, too.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from buildlib.checkpoint.layout import read_json
from buildlib.errors import ContainerError, ModelFileError, ToolchainError
from buildlib.toolchains.child_process import Step, run_step

TOKENIZER_CONFIG: Final = "tokenizer_config.json"
_JINJA: Final = "chat_template.jinja"
_MORE_TEMPLATES: Final = "additional_chat_templates"
_PROCESSOR: Final = "chat_template.json"
_TOKENS_MAP: Final = "special_tokens_map.json"
_TEMPLATE_KEY: Final = "chat_template"
_DEFAULT: Final = "default"
_SPECIAL_TOKENS: Final = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
_MAX_BYTES: Final = 16 << 20
"""Gemma 3's `tokenizer_config.json` has over a megabyte: it lists all special tokens."""
_WORKER: Final = "buildlib.container.template_worker"
_TIMEOUT_S: Final = 10.0

Message = Mapping[str, str]
"""`role` and `content`, as transformers takes them."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A template, and the special tokens that it may name.

    Attributes:
        special_tokens: pairs such as `("bos_token", "<s>")`, sorted.
    """

    text: str
    special_tokens: tuple[tuple[str, str], ...]

    @classmethod
    def find(cls, folder: Path) -> Self | None:
        """Read the default template of a model folder or container; None if it has none.

        Raises:
            ModelFileError: a file of it cannot be read.
        """
        config = _read_object(folder / TOKENIZER_CONFIG)
        text = _template_beside(folder)
        if text is None:
            text = _default_of(config.get(_TEMPLATE_KEY), folder / TOKENIZER_CONFIG)
        if text is None:
            processor = folder / _PROCESSOR
            text = _default_of(_read_object(processor).get(_TEMPLATE_KEY), processor)
        if text is None:
            return None
        if "added_tokens_decoder" not in config:  # files of older tokenizers
            config |= _read_object(folder / _TOKENS_MAP)
        tokens = {key: _token_text(config.get(key)) for key in sorted(_SPECIAL_TOKENS)}
        return cls(text, tuple((key, token) for key, token in tokens.items() if token))

    def to_json(self) -> str:
        """Return the content of a container's `tokenizer_config.json`."""
        config = {
            **dict(self.special_tokens),
            _TEMPLATE_KEY: self.text,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        return json.dumps(config, indent=2, ensure_ascii=False) + "\n"

    def render(
        self,
        conversations: Sequence[Sequence[Message]],
        container: Path,
        *,
        add_generation_prompt: bool = True,
        date: str | None = None,
    ) -> list[str]:
        """Render conversations, in a child process with bounded time and memory.

        Args:
            container: the folder that errors name.
            add_generation_prompt: end with the text that precedes an answer.
            date: what a template that writes today's date has for it, in ISO 8601; by default
                today.

        Raises:
            ContainerError: the template is wrong, refuses a conversation, or takes too much.
        """
        request = {
            "template": self.text,
            "special_tokens": dict(self.special_tokens),
            "conversations": [[dict(message) for message in each] for each in conversations],
            "add_generation_prompt": add_generation_prompt,
            "date": date,
        }
        step = Step(_WORKER, "render", container / TOKENIZER_CONFIG, _TIMEOUT_S, "")
        try:
            texts = run_step(step, json.dumps(request).encode())
            "".join(texts).encode()
        except ToolchainError as error:
            with suppress(OSError):  # a log without content
                Path(error.log_path).unlink()
            raise ContainerError(str(container), f"its chat template: {error.reason}") from error
        except UnicodeEncodeError as error:
            reason = "its chat template: it renders what is no text in UTF-8"
            raise ContainerError(str(container), reason) from error
        return list(texts)


def template_files(folder: Path) -> list[Path]:
    """Return the files of a folder that `ChatTemplate.find` reads."""
    names = (TOKENIZER_CONFIG, _JINJA, _PROCESSOR, _TOKENS_MAP)
    paths = [
        *(folder / name for name in names),
        *sorted((folder / _MORE_TEMPLATES).glob("*.jinja")),
    ]
    return [path for path in paths if path.is_file()]


def _template_beside(folder: Path) -> str | None:
    """Read the default Jinja file; these replace the templates of `tokenizer_config.json`."""
    main = folder / _JINJA
    more = {path.stem: path for path in (folder / _MORE_TEMPLATES).glob("*.jinja")}
    path = more.get(_DEFAULT, main if main.is_file() else None)
    if path is None:
        if more:
            raise ModelFileError(folder / _MORE_TEMPLATES, f"no default template beside {_JINJA}")
        return None
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ModelFileError(path, f"larger than {_MAX_BYTES:,} bytes")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileError(path, f"no text in UTF-8: {error}") from error


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    values = read_json(path, _MAX_BYTES)
    if not isinstance(values, dict):
        raise ModelFileError(path, "it holds no JSON object")
    return values


def _default_of(value: object, path: Path) -> str | None:
    """Return the template of a configuration: a text, or `default` of a list of named ones."""
    if isinstance(value, list):
        try:
            value = {each["name"]: each["template"] for each in value}
        except (TypeError, KeyError) as error:
            raise ModelFileError(path, "chat_template lists no names and templates") from error
    if isinstance(value, dict):
        value = value.get(_DEFAULT)
    if value is not None and not isinstance(value, str):
        raise ModelFileError(path, "chat_template is no text")
    return value


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):  # a token with its properties
        value = value.get("content")
    return value if isinstance(value, str) else None
