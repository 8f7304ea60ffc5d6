#!/usr/bin/env python3
"""Text generation with libGenie: the documented command line of the SDK's ``genie-t2t-run``.

For devices without an SDK binary: x86-64 (the emulator) and Linux boards. Standard library only,
Python 3.8+; README.md beside this file lists differences from the documented program. Exit status:
0 success, 1 Genie failed, 2 wrong use.
"""

import argparse
import ctypes
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, List, NoReturn, Optional, Sequence, Tuple

if TYPE_CHECKING:
    from device_scripts import genie_api
else:  # beside this file on the device
    import genie_api

_UNSUPPORTED = "is documented for genie-t2t-run but not supported by this runner"
_LARGEST_TOKEN = (1 << 31) - 1


class _Refuse(argparse.Action):
    """Refuses a documented option by name, instead of ignoring it."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        parser.error(f"{'/'.join(self.option_strings)} {_UNSUPPORTED}")


def _lora(text: str) -> Tuple[str, str, float]:
    adapter, tensor, value = text.split(",")
    if not adapter or not tensor:
        raise ValueError(text)
    return adapter, tensor, float(value)


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
    refusal = f"this {_UNSUPPORTED}"
    query.add_argument("-e", "--embedding_file", nargs="?", action=_Refuse, help=refusal)
    build.add_argument("-t", "--embedding_table", nargs="?", action=_Refuse, help=refusal)
    build.add_argument(
        "-l",
        "--lora",
        metavar="ADAPTER,ALPHA_TENSOR,VALUE",
        type=_lora,
        help="adapter to apply, and the strength of its alpha",
    )
    build.add_argument("-w", metavar="PROMPT", dest="rewind", help="second query, with KV rewind")
    build.add_argument("--log", choices=tuple(genie_api.LOG_LEVELS), help="Genie's own log")
    build.add_argument("--profile", metavar="FILE", help="write Genie's profile JSON")
    return build


def parse_tokens(text: bytes) -> List[int]:
    """Return the token ids of a tokens file.

    Raises:
        genie_api.RunnerError: It holds none, or something else.
    """
    tokens = []
    for word in text.split():
        if not word.isdigit() or int(word) > _LARGEST_TOKEN:
            raise genie_api.RunnerError(f"not a token id in the tokens file: {word[:40]!r}")
        tokens.append(int(word))
    if not tokens:
        raise genie_api.RunnerError("the tokens file holds no token id")
    return tokens


def flush_c() -> None:
    """Flush what the library has printed, so that it does not appear in later text."""
    ctypes.CDLL(None).fflush(None)


def write(data: bytes) -> None:
    """Write to stdout unchanged and unbuffered; a piece may end inside a UTF-8 character."""
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def c_string(text: bytes, what: str) -> bytes:
    """Return the text if C can hold it.

    Raises:
        genie_api.RunnerError: It holds a zero byte, where C would end it.
    """
    if b"\0" in text:
        raise genie_api.RunnerError(f"{what} holds a zero byte")
    return text


def check_status(status: int, *, generated: bool) -> None:
    """Accept a query that ended because the context was full, with a note.

    Raises:
        genie_api.GenieError: Nothing was generated: the prompt alone exceeds the context.
    """
    if status == genie_api.CONTEXT_EXCEEDED and not generated:
        raise genie_api.GenieError("GenieDialog_query: the prompt exceeds the context and", status)
    if status != 0:
        name = genie_api.STATUS_NAMES.get(status, "an undocumented status")
        print(f"genie-t2t-run: warning: {name} ({status})", file=sys.stderr)


def ask(dialog: genie_api.Dialog, prompt: bytes, *, rewind: bool = False) -> None:
    """Run one text query and print it in the documented form."""
    pieces: List[int] = []

    def sink(piece: bytes) -> None:
        pieces.append(len(piece))
        write(piece)

    flush_c()
    write(b"[PROMPT]: " + prompt + b"\n\n[BEGIN]: ")
    status = dialog.query(prompt, sink, rewind=rewind)
    write(b"[END]\n\n")
    check_status(status, generated=bool(pieces))


def ask_tokens(dialog: genie_api.Dialog, tokens: Sequence[int]) -> None:
    """Run one token query and print the answer as ids, the form in which Genie returns it."""
    count = 0

    def sink(ids: List[int]) -> None:
        nonlocal count
        write(b"".join(b"%s%d" % (b" " if count + i else b"", id_) for i, id_ in enumerate(ids)))
        count += len(ids)

    flush_c()
    write(b"[PROMPT]: " + " ".join(map(str, tokens)).encode() + b"\n\n[BEGIN]: ")
    status = dialog.token_query(tokens, sink)
    write(b"[END]\n\n")
    check_status(status, generated=count > 0)


def write_profile(profile: genie_api.Profile, path: str) -> None:
    """Write Genie's JSON atomically."""
    temporary = Path(f"{path}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(profile.json())
        temporary.replace(path)
    except OSError as error:
        raise genie_api.RunnerError(f"cannot write the profile {path}: {error}") from error


def run(options: argparse.Namespace) -> None:
    """Do what the options ask for.

    Raises:
        genie_api.RunnerError: A file, the library or Genie failed.
    """
    tokens: List[int] = []
    prompt = b""
    if options.tokens_file is not None:
        tokens = parse_tokens(genie_api.read_file(options.tokens_file, "tokens file"))
    elif options.prompt_file is not None:
        prompt = c_string(genie_api.read_file(options.prompt_file, "prompt file"), "the prompt")
    else:
        prompt = os.fsencode(options.prompt)
    text = c_string(genie_api.read_file(options.config, "configuration"), "the configuration")
    genie = genie_api.Genie()
    write(f"Using libGenie.so version {genie.version()}\n\n".encode())
    with genie_api.Resources() as resources:
        # Made first, to be freed last: Genie frees no profile that a configuration is bound to.
        log = resources.add(genie_api.Log(genie, options.log)) if options.log else None
        profile = resources.add(genie_api.Profile(genie)) if options.profile else None
        config = resources.add(genie_api.DialogConfig(genie, text))
        if log is not None:
            config.bind_log(log)
        if profile is not None:
            config.bind_profile(profile)
        dialog = resources.add(genie_api.Dialog(config))
        if options.lora:
            adapter, tensor, value = options.lora
            dialog.apply_lora("primary", adapter)
            dialog.set_lora_strength("primary", tensor, value)
        if tokens:
            ask_tokens(dialog, tokens)
        else:
            ask(dialog, prompt)
        if options.rewind is not None:
            ask(dialog, os.fsencode(options.rewind), rewind=True)
        if profile is not None:
            write_profile(profile, options.profile)


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the program and return its exit status."""
    build = parser()
    options = build.parse_args(arguments)
    if options.rewind is not None and options.tokens_file is not None:
        build.error("argument -w: not allowed with argument -tok/--tokens_file")
    try:
        run(options)
    except (genie_api.RunnerError, BrokenPipeError) as error:
        flush_c()
        print(f"genie-t2t-run: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
