"""Worker of `ChatTemplate.render`: `python -m buildlib.container.template_worker render ANSWER`.

A template is code of the model's publisher: it runs in jinja2's sandbox, and in a process with
little memory. Its variables and functions are those of transformers
(`utils/chat_template_utils.py` of transformers 5.24, Apache-2.0).
"""

import json
import resource
import sys
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from buildlib.toolchains.child_process import serve
from buildlib.toolchains.qnn.refusal import RefusedError

_MEMORY_BYTES = 512 << 20
_MOST_CHARACTERS = 16 << 20


class _GenerationBlocks(Extension):
    """`{% generation %}` marks the answers of a training text; it changes nothing of the text."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [jinja2.nodes.Scope(body, lineno=line)]


def render(request: bytes) -> list[str]:
    """Render the conversations of a request."""
    arguments = json.loads(request)
    try:
        template = _environment(arguments.get("date")).from_string(arguments["template"])
        texts = [
            template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=arguments["add_generation_prompt"],
                **arguments["special_tokens"],
            )
            for messages in arguments["conversations"]
        ]
    except MemoryError as error:
        raise RefusedError("it takes too much memory") from error
    except RecursionError as error:
        raise RefusedError("it is nested too deeply") from error
    except jinja2.TemplateSyntaxError as error:
        raise RefusedError(f"line {error.lineno}: {error.message}") from error
    except Exception as error:
        raise RefusedError(str(error) or type(error).__name__) from error
    if sum(map(len, texts)) > _MOST_CHARACTERS:
        raise RefusedError(f"it renders more than {_MOST_CHARACTERS:,} characters")
    return texts


def _environment(date: str | None) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = _to_json

    def format_now(form: str) -> str:
        now = datetime.now() if date is None else datetime.fromisoformat(date)  # noqa: DTZ005
        return now.strftime(form)  # local, as transformers has it

    environment.globals |= {"raise_exception": _raise, "strftime_now": format_now}
    return environment


def _to_json(
    value: Any,  # noqa: ANN401
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002  (templates give them by position)
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Write JSON without jinja2's escapes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    serve({"render": render}, sys.argv[1:])
