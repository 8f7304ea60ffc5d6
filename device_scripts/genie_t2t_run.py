#!/usr/bin/env python3
"""Text generation with libGenie: the documented command line of the SDK's ``genie-t2t-run``.

For devices without an SDK binary: x86-64 (the emulator) and Linux boards. Standard library only,
Python 3.8+; README.md beside this file lists differences from the documented program. Exit status:
0 success, 1 Genie failed, 2 wrong use.
"""

import argparse
import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Callable, List, Optional, Sequence, Tuple

if TYPE_CHECKING:
    from device_scripts import genie_api, genie_embeddings, genie_nodes, genie_trace
else:  # beside this file on the device
    import genie_api
    import genie_embeddings
    import genie_nodes
    import genie_trace

_LARGEST_TOKEN = (1 << 31) - 1


def lora(text: str) -> Tuple[str, str, float]:
    """Read ADAPTER_NAME,ALPHA_TENSOR_NAME,ALPHA_VALUE; raises `ValueError`."""
    adapter, tensor, value = text.split(",")
    if not adapter or not tensor:
        raise ValueError(text)
    return adapter, tensor, float(value)


def engine_switch(text: str) -> Tuple[str, str]:
    """Read ENGINE_TYPE,CONFIG; raises `ValueError`."""
    role, path = text.split(",", 1)
    if not role or not path:
        raise ValueError(text)
    return role, path.strip()


def parser() -> argparse.ArgumentParser:
    """Return the parser of the documented options."""
    build = argparse.ArgumentParser(prog="genie-t2t-run", allow_abbrev=False, description=__doc__)
    build.add_argument("-c", "--config", metavar="FILE", required=True, help="dialog JSON")
    query = build.add_mutually_exclusive_group(required=True)
    query.add_argument("-p", "--prompt", metavar="VAL", help="the prompt")
    query.add_argument("--prompt_file", metavar="FILE", help="file that holds the prompt")
    query.add_argument(
        "-tok",
        "--tokens_file",
        metavar="FILE",
        help="file of whitespace-separated token ids to query with (basic dialog only)",
    )
    query.add_argument(
        "-e",
        "--embedding_file",
        metavar="PATH[,TYPE,SCALE,OFFSET]",
        type=genie_embeddings.EmbeddingFile.parse,
        help="file of embeddings to query with, and the encoding of the graph's input",
    )
    build.add_argument(
        "-t",
        "--embedding_table",
        metavar="PATH[,TYPE,SCALE,OFFSET]",
        type=genie_embeddings.EmbeddingFile.parse,
        help="table that generated tokens are looked up in, and its encoding",
    )
    build.add_argument(
        "-l",
        "--lora",
        metavar="ADAPTER,ALPHA_TENSOR,VALUE",
        type=lora,
        help="adapter to apply, and the strength of its alpha",
    )
    build.add_argument(
        "--fill_file",
        metavar="FILE",
        help="token ids that fill the context before a query of -tok (option of ours)",
    )
    build.add_argument(
        "--allow_engine_switch",
        metavar="ENGINE_TYPE,CONFIG",
        type=engine_switch,
        help="engine (draft) to replace before the query, and the JSON of the other one",
    )
    build.add_argument("-w", metavar="PROMPT", dest="rewind", help="second query, with KV rewind")
    build.add_argument("--log", choices=tuple(genie_api.LOG_LEVELS), help="Genie's own log")
    build.add_argument("--profile", metavar="FILE", help="write Genie's profile JSON")
    build.add_argument(
        "--trace", metavar="FILE", help="write a trace that Perfetto reads (option of ours)"
    )
    build.add_argument(
        "--clock", metavar="FILE", help="write when each piece came, by our clock (option of ours)"
    )
    return build


def parse_tokens(text: bytes) -> List[int]:
    """Return the token ids of a tokens file."""
    tokens = []
    for word in text.split():
        if not word.isdigit() or int(word) > _LARGEST_TOKEN:
            raise genie_api.FatalError(f"not a token id in the tokens file: {word[:40]!r}")
        tokens.append(int(word))
    if not tokens:
        raise genie_api.FatalError("the tokens file holds no token id")
    return tokens


def flush_c() -> None:
    """Flush the library's output, so that it does not appear in later text."""
    ctypes.CDLL(None).fflush(None)


def fail(program: str, error: Exception) -> int:
    """Print why a runner ended, and return its exit status."""
    flush_c()
    print(f"{program}: error: {error}", file=sys.stderr)
    return 128 + error.number if isinstance(error, genie_api.Interrupted) else 1


def write(data: bytes) -> None:
    """Write to stdout unchanged and unbuffered; a piece may end inside a UTF-8 character."""
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def c_string(text: bytes, what: str) -> bytes:
    """Return the text, and refuse one with a zero byte, where C would end it."""
    if b"\0" in text:
        raise genie_api.FatalError(f"{what} holds a zero byte")
    return text


def check_status(status: int, *, generated: bool) -> None:
    """Note that a query ended in a full context; without an answer the prompt exceeds it."""
    if status == genie_api.CONTEXT_EXCEEDED and not generated:
        raise genie_api.GenieError("GenieDialog_query: the prompt exceeds the context and", status)
    if status != 0:
        name = genie_api.STATUS_NAMES.get(status, "an undocumented status")
        print(f"genie-t2t-run: warning: {name} ({status})", file=sys.stderr)


class TokenClock:
    """Times of the last query's pieces by the callback's clock, for profiles without figures.

    Args:
        most: Pieces (tokens) after which nothing more is taken, for dialogs that ignore
            ``max-num-tokens``; 0 for no bound.
    """

    def __init__(self, most: int = 0) -> None:
        self.most = most
        self.init_s = 0.0
        self.status = 0
        self.pieces: List[float] = []
        self._began = 0.0
        self._progress = genie_api.ProgressFile()

    def start(self) -> None:
        """Begin a query."""
        self.pieces = []
        self._began = time.monotonic()

    def takes(self) -> bool:
        """Note that a piece came, and say whether it is one to take."""
        if self.most and len(self.pieces) >= self.most:
            return False
        self.pieces.append(time.monotonic() - self._began)
        self._progress.tell(f"token {len(self.pieces)}")
        return True

    def json(self) -> str:
        """Return the query's status, and its times in seconds since it and the process began."""
        return json.dumps(
            {
                "format": 1,
                "init_s": self.init_s,
                "began_s": max(0.0, self._began - genie_trace.process_start_us() / 1e6),
                "status": self.status,
                "pieces": [round(moment, 6) for moment in self.pieces],
            }
        )


def ask(
    dialog: genie_api.DialogHandle,
    prompt: bytes,
    *,
    rewind: bool = False,
    clock: Optional[TokenClock] = None,
) -> None:
    """Run one text query and print it in the documented form."""
    _print_answer(prompt, lambda sink: dialog.query(prompt, sink, rewind=rewind), clock)


def ask_tokens(
    dialog: genie_api.DialogHandle, tokens: Sequence[int], clock: Optional[TokenClock] = None
) -> None:
    """Run one token query and print the answer as ids, the form in which Genie returns it."""
    clock = clock or TokenClock()
    count = 0

    def sink(ids: List[int]) -> None:
        nonlocal count
        if not clock.takes():
            return
        write(b"".join(b"%s%d" % (b" " if count + i else b"", id_) for i, id_ in enumerate(ids)))
        count += len(ids)

    flush_c()
    write(b"[PROMPT]: " + " ".join(map(str, tokens)).encode() + b"\n\n[BEGIN]: ")
    clock.start()
    clock.status = dialog.token_query(tokens, sink)
    write(b"[END]\n\n")
    check_status(clock.status, generated=count > 0)


def fill_context(dialog: genie_api.DialogHandle, tokens: Sequence[int], most: int) -> None:
    """Run one token query that generates nothing, so that the next one finds it in the context.

    Args:
        most: Tokens that later queries generate at most.
    """
    dialog.set_max_tokens(0)
    check_status(dialog.token_query(tokens, lambda _ids: None), generated=False)
    dialog.set_max_tokens(most)


def ask_embeddings(
    dialog: genie_api.DialogHandle,
    rows: bytes,
    lookup: Optional[genie_api.Lookup],
    clock: Optional[TokenClock] = None,
) -> None:
    """Run one query by embeddings and print the answer as text."""
    label = b"%d bytes of embeddings" % len(rows)
    _print_answer(label, lambda sink: dialog.embedding_query(rows, lookup, sink), clock)


def _print_answer(
    prompt: bytes,
    query: "Callable[[genie_api.TextSink], int]",
    clock: Optional[TokenClock],
) -> None:
    """Run a query that answers in text, and print both in the documented form."""
    clock = clock or TokenClock()

    def sink(piece: bytes) -> None:
        if clock.takes():
            write(piece)

    flush_c()
    write(b"[PROMPT]: " + prompt + b"\n\n[BEGIN]: ")
    clock.start()
    clock.status = query(sink)
    write(b"[END]\n\n")
    check_status(clock.status, generated=bool(clock.pieces))


def show_embedding(text: bytes, shape: Sequence[int]) -> None:
    """Print a text that was embedded, and the shape of its vectors."""
    flush_c()
    sizes = "x".join(map(str, shape))
    write(b"[PROMPT]: " + text + f"\n[EMBEDDING]: {sizes}\n\n".encode())


def token_bound(config: bytes) -> int:
    """Return the bound that this runner keeps itself: lade dialogs ignore ``max-num-tokens``."""
    try:
        dialog = json.loads(config)["dialog"]
        most = dialog.get("max-num-tokens", 0)
        return int(most) if dialog.get("type") == "lade" else 0
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return 0  # Genie's own parser says what is wrong


def answer_bound(config: bytes) -> int:
    """Return ``max-num-tokens`` of a configuration, or the context's size where it has none."""
    try:
        dialog = json.loads(config)["dialog"]
        return int(dialog.get("max-num-tokens") or dialog["context"]["size"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise genie_api.FatalError("the configuration has no dialog.context.size") from None


def observe(
    resources: genie_api.Resources, genie: genie_api.Genie, options: argparse.Namespace
) -> Tuple[Optional[genie_api.LogHandle], Optional[genie_api.ProfileHandle]]:
    """Make the log and the profile that the options ask for, each None without.

    Before what they are bound to, to be freed last: Genie frees no profile that a configuration is
    bound to.
    """
    log = resources.add(genie_api.LogHandle(genie, options.log)) if options.log else None
    if options.profile is None and options.trace is None:
        return log, None
    return log, resources.add(genie_api.ProfileHandle(genie, trace=options.trace is not None))


def write_profile(
    profile: genie_api.ProfileHandle,
    path: Optional[str],
    trace: Optional[str],
    answers: Sequence[genie_trace.Answer] = (),
    calls: Sequence[genie_trace.Event] = (),
) -> None:
    """Write Genie's profile, and a trace beside it.

    Args:
        path: Of the profile; None writes none.
        trace: Of the trace; None writes none.
        answers: Of all dialogs, in the order of their moments.
        calls: Those of the API that profiles do not list.
    """
    content = profile.json()
    if trace is not None:
        content, traced = genie_trace.split_profile(content)
        write_file(genie_trace.document(traced, answers, calls), trace, "trace")
    if path is not None:
        write_file(content, path, "profile")


def write_file(data: bytes, path: str, what: str) -> None:
    """Write a result atomically."""
    temporary = Path(f"{path}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        raise genie_api.FatalError(f"cannot write the {what} {path}: {error}") from error


def query_of(
    options: argparse.Namespace, clock: TokenClock
) -> Callable[[genie_api.DialogHandle], None]:
    """Return the query that the options ask for; its files are read before Genie is loaded."""
    if options.tokens_file is not None:
        tokens = parse_tokens(genie_api.read_file(options.tokens_file, "tokens file"))
        if options.fill_file is None:
            return lambda dialog: ask_tokens(dialog, tokens, clock)
        fill = parse_tokens(genie_api.read_file(options.fill_file, "fill file"))
        most = answer_bound(genie_api.read_file(options.config, "configuration"))

        def fill_and_ask(dialog: genie_api.DialogHandle) -> None:
            fill_context(dialog, fill, most)
            ask_tokens(dialog, tokens, clock)

        return fill_and_ask
    if options.embedding_file is not None:
        rows = genie_embeddings.read_rows(options.embedding_file.path)
        lookup = None
        if options.embedding_table is not None:
            target = options.embedding_file.encoding
            lookup = genie_embeddings.EmbeddingRows(options.embedding_table, target)
        return lambda dialog: ask_embeddings(dialog, rows, lookup, clock)
    prompt = (
        os.fsencode(options.prompt)
        if options.prompt_file is None
        else genie_api.read_file(options.prompt_file, "prompt file")
    )
    text = c_string(prompt, "the prompt")
    return lambda dialog: ask(dialog, text, clock=clock)


def run(options: argparse.Namespace, stop: genie_api.Stop) -> None:
    """Run the queries of the options, and write the files that they name."""
    text = c_string(genie_api.read_file(options.config, "configuration"), "the configuration")
    clock = TokenClock(token_bound(text))
    query = query_of(options, clock)
    genie = genie_api.Genie(stop=stop)
    write(f"Using libGenie.so version {genie.version()}\n\n".encode())
    with genie_api.Resources() as resources:
        log, profile = observe(resources, genie, options)
        config = resources.add(genie_api.DialogConfigHandle(genie, text))
        config.bind(log, profile)
        began = time.monotonic()
        dialog = resources.add(genie_api.DialogHandle(config))
        clock.init_s = time.monotonic() - began
        if options.lora:
            adapter, tensor, value = options.lora
            dialog.apply_lora("primary", adapter)
            dialog.set_lora_strength("primary", tensor, value)
        if options.allow_engine_switch:
            role, path = options.allow_engine_switch
            content = genie_api.read_file(path, "engine configuration")
            engine = genie_nodes.EngineConfigHandle(
                genie, c_string(content, "the engine configuration")
            )
            resources.add(engine).bind(log)
            dialog.bind_engine(role, resources.add(genie_nodes.EngineHandle(engine)))
        query(dialog)
        if options.rewind is not None:
            ask(dialog, os.fsencode(options.rewind), rewind=True, clock=clock)
        if profile is not None:
            write_profile(profile, options.profile, options.trace, dialog.answers)
        if options.clock is not None:
            write_file(clock.json().encode(), options.clock, "clock")


def main(arguments: Optional[Sequence[str]] = None, stop: Optional[genie_api.Stop] = None) -> int:
    """Run the program and return its exit status."""
    build = parser()
    options = build.parse_args(arguments)
    if options.rewind is not None and options.prompt is None and options.prompt_file is None:
        build.error("argument -w: goes with a prompt (-p or --prompt_file)")
    if options.fill_file is not None and options.tokens_file is None:
        build.error("argument --fill_file: goes with -tok/--tokens_file")
    if options.embedding_table is not None and options.embedding_file is None:
        build.error("argument -t/--embedding_table: goes with -e/--embedding_file")
    try:
        run(options, stop or genie_api.Stop())
    except (genie_api.FatalError, BrokenPipeError) as error:
        return fail("genie-t2t-run", error)
    return 0


if __name__ == "__main__":
    genie_api.leave(main(stop=genie_api.Stop.watching()))
