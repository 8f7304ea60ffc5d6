#!/usr/bin/env python3
"""Runs scripts of libGenie commands: a subset of the SDK's ``genie-app``, spelled as documented.

For devices without an SDK binary. Standard library only, Python 3.8+; README.md beside this file
lists differences from the documented program, and spellings of our own. Exit status: 0 success, 1
Genie failed, 2 wrong use (of the options, or in the script).
"""

import argparse
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    List,
    Optional,
    Sequence,
    Tuple,
    Type,
    TypeVar,
)

if TYPE_CHECKING:
    from device_scripts import genie_api, genie_embeddings, genie_nodes, genie_t2t_run, genie_trace
    from device_scripts.genie_app_script import Loop, ScriptError, Statement, Usage, Word, parse
else:  # beside this file on the device
    import genie_api
    import genie_embeddings
    import genie_nodes
    import genie_t2t_run
    import genie_trace
    from genie_app_script import Loop, ScriptError, Statement, Usage, Word, parse


def _usages_of(kind: str, note: str = "") -> Tuple[Usage, ...]:
    """Return the commands that make an object from a configuration, and free both."""
    name = f"{kind.upper()}_NAME"
    texts = (
        "config create CONFIG_NAME FILE.json",
        "config bind profile CONFIG_NAME PROFILE_NAME",
        "config bind log CONFIG_NAME LOG_NAME",
        "config free CONFIG_NAME",
        f"create {name} CONFIG_NAME",
        f"free {name}",
    )
    return tuple(Usage(f"{kind} {text}", note) for text in texts)


_OURS = "spelling ours"
_USAGES = (
    *_usages_of("dialog"),
    *_usages_of("embedding"),
    *_usages_of("engine", _OURS),
    *_usages_of("node", _OURS),
    *_usages_of("pipeline", _OURS),
    Usage('dialog query DIALOG_NAME "PROMPT"/PROMPT_FILE [OUTPUT_FILE]'),
    Usage('dialog rewindQuery DIALOG_NAME "PROMPT"/PROMPT_FILE [OUTPUT_FILE]'),
    Usage("dialog tokenQuery DIALOG_NAME TOKENS_PATH [OUTPUT_FILE]"),
    Usage("dialog embeddingQuery DIALOG_NAME EMBEDDINGS_PATH EMBEDDINGS_TABLE_PATH [OUTPUT_FILE]"),
    Usage(
        "dialog embeddingTokenQuery DIALOG_NAME EMBEDDINGS_PATH EMBEDDINGS_TABLE_PATH [OUTPUT_FILE]"
    ),
    Usage("dialog applyLora DIALOG_NAME ENGINE_NAME ADAPTER_NAME"),
    Usage("dialog setLoraStrength DIALOG_NAME ENGINE_NAME TENSOR_NAME ALPHA ..."),
    Usage("dialog setPerformance DIALOG_NAME POLICY"),
    Usage("dialog setPriority DIALOG_NAME ENGINE_NAME PRIORITY", _OURS),
    Usage("dialog bindEngine DIALOG_NAME ENGINE_TYPE ENGINE_NAME", _OURS),
    Usage("dialog setStopSequence DIALOG_NAME FILE.json", _OURS),
    Usage("dialog setMaxNumTokens DIALOG_NAME COUNT", _OURS),
    Usage("dialog reset DIALOG_NAME"),
    Usage("dialog save DIALOG_NAME PATH"),
    Usage("dialog restore DIALOG_NAME PATH"),
    Usage('embedding generate EMBEDDING_NAME "PROMPT"/PROMPT_FILE [OUTPUT_FILE]'),
    Usage("embedding setPerformance EMBEDDING_NAME POLICY"),
    Usage('node setText NODE_NAME "PROMPT"/PROMPT_FILE', _OURS),
    Usage("pipeline addNode PIPELINE_NAME NODE_NAME", _OURS),
    Usage("pipeline execute PIPELINE_NAME [OUTPUT_FILE]", _OURS),
    Usage("pipeline reset PIPELINE_NAME", _OURS),
    Usage("pipeline save PIPELINE_NAME PATH", _OURS),
    Usage("pipeline restore PIPELINE_NAME PATH", _OURS),
    Usage("profile create PROFILE_NAME"),
    Usage("profile save PROFILE_NAME FILE.json"),
    Usage("profile free PROFILE_NAME"),
    Usage("log create LOG_NAME LEVEL", _OURS),
    Usage("log free LOG_NAME", _OURS),
    Usage("accuracy config create CONFIG_NAME FILE.json", _OURS),
    Usage("accuracy config free CONFIG_NAME", _OURS),
    Usage("accuracy create ACCURACY_NAME CONFIG_NAME DIALOG_NAME", _OURS),
    Usage("accuracy compute ACCURACY_NAME [OUTPUT_FILE]", _OURS),
    Usage("accuracy free ACCURACY_NAME", _OURS),
    Usage("version"),
    Usage("ls"),
    Usage("sleep MILLISECONDS"),
    Usage("exit"),
)
_UNTOLD = "the public documentation does not tell its arguments"
_UNSUPPORTED = (
    Usage(
        "dialog batchQuery",
        "it takes graphs of several batches, which nothing here builds (Genie fails others, -6)",
    ),
    Usage("dialog signal", "it is for a query in progress, and scripts run one command at a time"),
    Usage("pipeline connect", _UNTOLD),
    Usage("sampler", _UNTOLD),
    Usage("tokenizer", _UNTOLD),
    Usage("dlc", _UNTOLD),
)
_CONFIGS: Dict[str, Type[genie_api.ConfigHandle]] = {
    "dialog": genie_api.DialogConfigHandle,
    "embedding": genie_api.EmbeddingConfigHandle,
    "engine": genie_nodes.EngineConfigHandle,
    "node": genie_nodes.NodeConfigHandle,
    "pipeline": genie_nodes.PipelineConfigHandle,
}
_LOADED: Dict[str, Callable[[Any], genie_api.LoadedHandle]] = {
    "dialog": genie_api.DialogHandle,
    "embedding": genie_api.EmbeddingHandle,
    "engine": genie_nodes.EngineHandle,
    "node": genie_nodes.NodeHandle,
    "pipeline": genie_nodes.PipelineHandle,
}
_WITH_PROMPT = frozenset(("query", "rewindQuery", "generate", "setText"))
_OwnedType = TypeVar("_OwnedType", bound=genie_api.Owned)


class _Exit(Exception):  # noqa: N818  (no error)
    """The script runs ``exit``."""


class App:
    """Runs the statements of a script; owns their objects, until freed or closed.

    A name may be used once for each kind of object.

    Args:
        log: Level of a log that every dialog writes to.
        trace: File for the trace of the profile that is saved last.
    """

    def __init__(
        self, genie: genie_api.Genie, log: Optional[str] = None, trace: Optional[str] = None
    ) -> None:
        self._genie = genie
        self._log = genie_api.LogHandle(genie, log) if log else None
        self._trace = trace
        self._dialogs: List[genie_api.DialogHandle] = []
        self._calls: List[genie_trace.Event] = []
        self._objects: Dict[Tuple[str, str], genie_api.Owned] = {}
        self._commands: Dict[Tuple[str, ...], Callable[..., None]] = {
            ("version",): self._version,
            ("ls",): self._list,
            ("sleep",): self._sleep,
            ("exit",): self._exit,
            ("dialog", "query"): partial(self._ask, rewind=False),
            ("dialog", "rewindQuery"): partial(self._ask, rewind=True),
            ("dialog", "tokenQuery"): self._token_query,
            ("dialog", "embeddingQuery"): self._embedding_query,
            ("dialog", "embeddingTokenQuery"): self._embedding_token_query,
            ("dialog", "setPriority"): self._set_priority,
            ("dialog", "bindEngine"): self._bind_engine,
            ("dialog", "setStopSequence"): lambda name, path: self._dialog(name).set_stop_sequence(
                _read_json(path)
            ),
            ("dialog", "setMaxNumTokens"): self._set_max_tokens,
            ("dialog", "save"): lambda name, path: self._timed(
                "GenieDialog_save", partial(self._dialog(name).save, path)
            ),
            ("dialog", "restore"): lambda name, path: self._timed(
                "GenieDialog_restore", partial(self._dialog(name).restore, path)
            ),
            ("dialog", "applyLora"): lambda name, *words: self._dialog(name).apply_lora(*words),
            ("dialog", "setLoraStrength"): self._set_lora_strength,
            ("dialog", "setPerformance"): self._set_performance,
            ("dialog", "reset"): lambda name: self._dialog(name).reset(),
            ("embedding", "generate"): self._embedding_generate,
            ("embedding", "setPerformance"): self._embedding_set_performance,
            ("node", "setText"): self._node_set_text,
            ("pipeline", "addNode"): self._pipeline_add_node,
            ("pipeline", "execute"): self._pipeline_execute,
            ("pipeline", "reset"): lambda name: self._pipeline(name).reset(),
            ("pipeline", "save"): lambda name, path: self._pipeline(name).save(path),
            ("pipeline", "restore"): lambda name, path: self._pipeline(name).restore(path),
            ("profile", "create"): self._profile_create,
            ("profile", "save"): self._profile_save,
            ("log", "create"): self._log_create,
            ("accuracy", "config", "create"): self._accuracy_config_create,
            ("accuracy", "create"): self._accuracy_create,
            ("accuracy", "compute"): self._accuracy_compute,
        }
        for kind in _CONFIGS:
            self._commands[kind, "create"] = partial(self._create, kind)
            self._commands[kind, "config", "create"] = partial(self._config_create, kind)
            self._commands[kind, "config", "bind", "profile"] = partial(self._bind_profile, kind)
            self._commands[kind, "config", "bind", "log"] = partial(self._bind_log, kind)

    def run(self, statements: Sequence[Statement]) -> None:
        """Run to the end, or to ``exit``.

        Raises:
            ScriptError: A name is unknown or taken, or an argument has no meaning.
            genie_api.FatalError: Genie failed; the message names the line.
        """
        try:
            self._run_block(statements)
        except _Exit:
            return

    def close(self) -> None:
        """Free all remaining objects, in reverse order."""
        with genie_api.Resources() as resources:
            for owned in self._objects.values():
                resources.add(owned)
            self._objects.clear()

    def _run_block(self, statements: Sequence[Statement]) -> None:
        for statement in statements:
            if isinstance(statement, Loop):
                for _ in range(statement.times):
                    self._run_block(statement.body)
                continue
            try:
                self._run_command(statement.words, statement.arguments)
            except _Wrong as error:
                raise ScriptError(statement.line, str(error)) from error
            except genie_api.Interrupted:
                raise
            except genie_api.FatalError as error:
                raise genie_api.FatalError(f"line {statement.line}: {error}") from error

    def _run_command(self, words: Tuple[str, ...], arguments: Tuple[Word, ...]) -> None:
        if words[-1] == "free":
            self._free(" ".join(words[:-1]), arguments[0].text)
        elif words[-1] in _WITH_PROMPT:
            self._commands[words](arguments[0].text, arguments[1], *(a.text for a in arguments[2:]))
        else:
            self._commands[words](*(argument.text for argument in arguments))

    def _add(self, kind: str, name: str, make: Callable[[], genie_api.Owned]) -> None:
        if (kind, name) in self._objects:
            raise _Wrong(f"the {kind} {name} is there already")
        self._objects[kind, name] = make()

    def _get(self, kind: str, name: str, type_: Type[_OwnedType]) -> _OwnedType:
        handle = self._objects.get((kind, name))
        if not isinstance(handle, type_):
            raise _Wrong(f"there is no {kind} {name}")
        return handle

    def _dialog(self, name: str) -> genie_api.DialogHandle:
        return self._get("dialog", name, genie_api.DialogHandle)

    def _free(self, kind: str, name: str) -> None:
        self._get(kind, name, genie_api.Owned).close()
        del self._objects[kind, name]

    def _version(self) -> None:
        _say(f"Using libGenie.so version {self._genie.version()}")

    def _list(self) -> None:
        for kind, name in self._objects:
            _say(f"{kind} {name}")

    def _sleep(self, milliseconds: str) -> None:
        if not milliseconds.isdigit() or len(milliseconds) > 9:
            raise _Wrong(f"not a number of milliseconds: {milliseconds}")
        end = time.monotonic() + int(milliseconds) / 1000
        while (left_s := end - time.monotonic()) > 0:
            self._genie.stop.check()
            time.sleep(min(left_s, 0.5))

    @staticmethod
    def _exit() -> None:
        raise _Exit

    def _config_create(self, kind: str, name: str, path: str) -> None:
        text = _read_json(path)

        def create() -> genie_api.ConfigHandle:
            config = _CONFIGS[kind](self._genie, text)
            config.bind(self._log)
            return config

        self._add(f"{kind} config", name, create)

    def _bind_profile(self, kind: str, config: str, profile: str) -> None:
        bound = self._get("profile", profile, genie_api.ProfileHandle)
        self._get(f"{kind} config", config, _CONFIGS[kind]).bind(None, bound)

    def _bind_log(self, kind: str, config: str, log: str) -> None:
        bound = self._get("log", log, genie_api.LogHandle)
        self._get(f"{kind} config", config, _CONFIGS[kind]).bind(bound)

    def _create(self, kind: str, name: str, config: str) -> None:
        handle = self._get(f"{kind} config", config, _CONFIGS[kind])
        self._add(kind, name, lambda: _LOADED[kind](handle))
        if kind == "dialog":
            self._dialogs.append(self._dialog(name))

    def _ask(self, name: str, prompt: Word, output: str = "", *, rewind: bool) -> None:
        dialog, text = self._dialog(name), _prompt_text(prompt)
        if not output:
            genie_t2t_run.ask(dialog, text, rewind=rewind)
            return
        pieces: List[bytes] = []
        status = dialog.query(text, pieces.append, rewind=rewind)
        _write_file(output, b"".join(pieces))
        genie_t2t_run.check_status(status, generated=bool(pieces))

    def _token_query(self, name: str, path: str, output: str = "") -> None:
        dialog = self._dialog(name)
        tokens = genie_t2t_run.parse_tokens(genie_api.read_file(path, "tokens file"))
        if not output:
            genie_t2t_run.ask_tokens(dialog, tokens)
            return
        answer: List[int] = []
        status = dialog.token_query(tokens, answer.extend)
        _write_file(output, " ".join(map(str, answer)).encode())
        genie_t2t_run.check_status(status, generated=bool(answer))

    def _embedding_query(self, name: str, path: str, table: str, output: str = "") -> None:
        dialog, rows = self._dialog(name), genie_embeddings.read_rows(path)
        lookup = genie_embeddings.EmbeddingRows(genie_embeddings.EmbeddingFile.parse(table))
        if not output:
            genie_t2t_run.ask_embeddings(dialog, rows, lookup)
            return
        pieces: List[bytes] = []
        status = dialog.embedding_query(rows, lookup, pieces.append)
        _write_file(output, b"".join(pieces))
        genie_t2t_run.check_status(status, generated=bool(pieces))

    def _embedding_token_query(self, name: str, path: str, table: str, output: str = "") -> None:
        dialog, rows = self._dialog(name), genie_embeddings.read_rows(path)
        lookup = genie_embeddings.EmbeddingRows(genie_embeddings.EmbeddingFile.parse(table))
        answer: List[int] = []
        status = dialog.embedding_token_query(rows, lookup, answer.extend)
        text = " ".join(map(str, answer))
        if output:
            _write_file(output, text.encode())
        else:
            _say(text)
        genie_t2t_run.check_status(status, generated=bool(answer))

    def _set_max_tokens(self, name: str, count: str) -> None:
        if not count.isdigit() or len(count) > 9:
            raise _Wrong(f"not a number of tokens: {count}")
        self._dialog(name).set_max_tokens(int(count))

    def _timed(self, name: str, call: Callable[[], None]) -> None:
        """Run a call of the API that Genie's profiles do not list, and note it for a trace."""
        began = time.monotonic_ns()
        call()
        self._calls.append(genie_trace.call(name, began))

    def _set_lora_strength(self, name: str, engine: str, *pairs: str) -> None:
        dialog = self._dialog(name)
        if len(pairs) % 2:
            raise _Wrong("each TENSOR_NAME needs an ALPHA")
        for tensor, alpha in zip(pairs[::2], pairs[1::2]):
            try:
                value = float(alpha)
            except ValueError:
                raise _Wrong(f"not a number: {alpha}") from None
            dialog.set_lora_strength(engine, tensor, value)

    def _set_performance(self, name: str, policy: str) -> None:
        _check_known("policy", policy, genie_api.PERFORMANCE_POLICIES)
        self._dialog(name).set_performance(policy)

    def _set_priority(self, name: str, engine: str, priority: str) -> None:
        _check_known("priority", priority, genie_api.PRIORITIES)
        self._dialog(name).set_priority(engine, priority)

    def _bind_engine(self, name: str, role: str, engine: str) -> None:
        self._dialog(name).bind_engine(role, self._get("engine", engine, genie_nodes.EngineHandle))

    def _embedding_generate(self, name: str, prompt: Word, output: str = "") -> None:
        embedding = self._get("embedding", name, genie_api.EmbeddingHandle)
        text = _prompt_text(prompt)
        vectors = embedding.generate(text)
        if output:
            _write_file(output, vectors.data)
        genie_t2t_run.show_embedding(text, vectors.shape)

    def _embedding_set_performance(self, name: str, policy: str) -> None:
        _check_known("policy", policy, genie_api.PERFORMANCE_POLICIES)
        self._get("embedding", name, genie_api.EmbeddingHandle).set_performance(policy)

    def _node_set_text(self, name: str, prompt: Word) -> None:
        self._get("node", name, genie_nodes.NodeHandle).set_text(_prompt_text(prompt))

    def _pipeline(self, name: str) -> genie_nodes.PipelineHandle:
        return self._get("pipeline", name, genie_nodes.PipelineHandle)

    def _pipeline_add_node(self, name: str, node: str) -> None:
        self._pipeline(name).add(self._get("node", node, genie_nodes.NodeHandle))

    def _pipeline_execute(self, name: str, output: str = "") -> None:
        text = self._pipeline(name).execute()
        if output:
            _write_file(output, text)
        else:
            genie_t2t_run.flush_c()
            genie_t2t_run.write(b"[BEGIN]: " + text + b"[END]\n\n")

    def _profile_create(self, name: str) -> None:
        trace = self._trace is not None
        self._add("profile", name, lambda: genie_api.ProfileHandle(self._genie, trace=trace))

    def _profile_save(self, name: str, path: str) -> None:
        profile = self._get("profile", name, genie_api.ProfileHandle)
        answers = sorted(answer for dialog in self._dialogs for answer in dialog.answers)
        genie_t2t_run.write_profile(profile, path, self._trace, answers, self._calls)

    def _log_create(self, name: str, level: str) -> None:
        _check_known("level", level, genie_api.LOG_LEVELS)
        self._add("log", name, lambda: genie_api.LogHandle(self._genie, level))

    def _accuracy_config_create(self, name: str, path: str) -> None:
        text = _read_json(path)
        self._add(
            "accuracy config", name, lambda: genie_api.AccuracyConfigHandle(self._genie, text)
        )

    def _accuracy_create(self, name: str, config: str, dialog: str) -> None:
        handle = self._get("accuracy config", config, genie_api.AccuracyConfigHandle)
        tied = self._dialog(dialog)
        self._add("accuracy", name, lambda: genie_api.AccuracyHandle(handle, tied))

    def _accuracy_compute(self, name: str, output: str = "") -> None:
        result = self._get("accuracy", name, genie_api.AccuracyHandle).compute()
        if output:
            _write_file(output, result)
        else:
            genie_t2t_run.flush_c()
            genie_t2t_run.write(result + b"\n")


class _Wrong(Exception):  # noqa: N818  (becomes a ScriptError where the line is known)
    """A command has no meaning here."""


def _check_known(what: str, word: str, known: Dict[str, int]) -> None:
    if word not in known:
        raise _Wrong(f"unknown {what} {word}: known are {', '.join(known)}")


def _prompt_text(prompt: Word) -> bytes:
    text = os.fsencode(prompt.text)
    if not prompt.quoted:
        text = genie_api.read_file(prompt.text, "prompt file")
    return genie_t2t_run.c_string(text, "the prompt")


def _say(text: str) -> None:
    genie_t2t_run.flush_c()
    genie_t2t_run.write(text.encode() + b"\n")


def _read_json(path: str) -> bytes:
    return genie_t2t_run.c_string(genie_api.read_file(path, "configuration"), "the configuration")


def _write_file(path: str, data: bytes) -> None:
    try:
        Path(path).write_bytes(data)
    except OSError as error:
        raise genie_api.FatalError(f"cannot write {path}: {error.strerror}") from error


def commands_help() -> str:
    """Return every command of the script language, one a line."""
    lines = [f"  {usage.text}{f'    ({usage.note})' if usage.note else ''}" for usage in _USAGES]
    lines += ["  loop COUNT", "  endloop", "  # comment line"]
    return "script commands:\n" + "\n".join(lines)


def parse_script(text: str) -> Tuple[Statement, ...]:
    """Parse a script into statements, checked against the supported commands."""
    return parse(
        text,
        {usage.words: usage for usage in _USAGES},
        {usage.words: usage for usage in _UNSUPPORTED},
    )


def _decode(script: bytes) -> str:
    try:
        return script.decode()
    except UnicodeDecodeError as error:
        raise ScriptError(script.count(b"\n", 0, error.start) + 1, "not UTF-8") from error


def main(arguments: Optional[Sequence[str]] = None, stop: Optional[genie_api.Stop] = None) -> int:
    """Run the program and return its exit status."""
    build = argparse.ArgumentParser(
        prog="genie-app",
        allow_abbrev=False,
        description=__doc__,
        epilog=commands_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    build.add_argument("-s", "--script", metavar="FILE", required=True, help="the script to run")
    build.add_argument(
        "--log",
        choices=tuple(genie_api.LOG_LEVELS),
        help="log of all dialogs, on stderr (option of ours)",
    )
    build.add_argument(
        "--trace", metavar="FILE", help="write a trace that Perfetto reads (option of ours)"
    )
    options = build.parse_args(arguments)
    try:
        statements = parse_script(_decode(genie_api.read_file(options.script, "script")))
        app = App(genie_api.Genie(stop=stop), options.log, options.trace)
        try:
            app.run(statements)
        finally:
            app.close()
    except ScriptError as error:
        print(f"genie-app: error: {options.script}: {error}", file=sys.stderr)
        return 2
    except (genie_api.FatalError, BrokenPipeError) as error:
        return genie_t2t_run.fail("genie-app", error)
    return 0


if __name__ == "__main__":
    genie_api.leave(main(stop=genie_api.Stop.watching()))
