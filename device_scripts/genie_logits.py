#!/usr/bin/env python3
"""Logits of each decode step on given tokens, by Genie's custom sampler.

Genie asks the sampler for the next token and hands it the logits; ours keeps them, and answers with
the next token of a given text. So step by step the model decodes that text. Standard library only,
Python 3.8+. Exit status: 0 success, 1 Genie failed, 2 wrong use.
"""

import argparse
import ctypes
import json
from typing import IO, TYPE_CHECKING, Any, Callable, List, NamedTuple, Optional, Sequence

if TYPE_CHECKING:
    from device_scripts import genie_api, genie_t2t_run
else:  # beside this file on the device
    import genie_api
    import genie_t2t_run

SAMPLER = "qnnfarm-steps"
_FORMAT = 1
_LARGEST_TOKEN = (1 << 31) - 1


class TokenWindow(NamedTuple):
    """A text as tokens: the prompt, and those that follow, which are decoded one by one."""

    prompt: List[int]
    following: List[int]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    build = argparse.ArgumentParser(prog="genie-logits", allow_abbrev=False, description=__doc__)
    build.add_argument("-c", "--config", metavar="FILE", required=True, help="dialog JSON")
    build.add_argument(
        "--windows",
        metavar="FILE",
        required=True,
        help='JSON array of {"prompt": [ids], "following": [ids]}',
    )
    build.add_argument(
        "--output_file", metavar="FILE", required=True, help="float32 logits, step by step"
    )
    build.add_argument("--summary", metavar="FILE", required=True, help="JSON of what was written")
    build.add_argument("--log", choices=tuple(genie_api.LOG_LEVELS), help="Genie's own log")
    build.add_argument("--trace", metavar="FILE", help="write a trace that Perfetto reads")
    return build


def read_windows(path: str) -> List[TokenWindow]:
    """Return the windows of a file."""
    try:
        content = json.loads(genie_api.read_file(path, "windows"))
        windows = [TokenWindow(list(each["prompt"]), list(each["following"])) for each in content]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise genie_api.FatalError(f"{path} holds no windows: {error!r}") from error
    for window in windows:
        for token in (*window.prompt, *window.following):
            if type(token) is not int or not 0 <= token <= _LARGEST_TOKEN:
                raise genie_api.FatalError(f"{path} holds no token ids: {token!r}")
    if not windows or not all(window.prompt and window.following for window in windows):
        raise genie_api.FatalError(f"{path} holds an empty window")
    return windows


class LogitsSampler:
    """The sampler: writes the logits of each step, and answers with the next token of a text."""

    def __init__(self, sink: IO[bytes]) -> None:
        self._sink = sink
        self._following: List[int] = []
        self.done = 0
        self.step_bytes = 0
        self._progress = genie_api.ProgressFile()

    def follow(self, tokens: Sequence[int]) -> None:
        """Begin a text."""
        self._following = list(tokens)
        self.done = 0

    def __call__(self, logits: bytes) -> int:
        """Take the logits of a step, and return the token to go on with."""
        if self.done >= len(self._following):
            return self._following[-1]  # the library asks once more than it was to
        self.step_bytes = self.step_bytes or len(logits)
        if len(logits) != self.step_bytes:
            raise genie_api.FatalError(
                f"a step has {len(logits)} bytes of logits, the one before {self.step_bytes}"
            )
        self._sink.write(logits)
        self.done += 1
        self._progress.tell(f"step {self.done}/{len(self._following)} of a window")
        return self._following[self.done - 1]


class SamplerCallback:
    """A sampler that dialogs choose tokens by: ``{"type": "custom", "callback-name": NAME}``.

    The library calls it as long as a dialog of that sampler lives, so it must live as long.

    Args:
        choose: gets the logits of a step, float32 for each token of the vocabulary, and returns the
            next token. Its first exception ends nothing in the library: `check` raises it.
    """

    def __init__(self, genie: genie_api.Genie, name: str, choose: Callable[[bytes], int]) -> None:
        self._choose = choose
        self._failures: List[BaseException] = []
        self._callback = genie_api.SamplerFunction(self._answer)
        register = "GenieSampler_registerUserDataCallback"
        genie.call(register, name.encode(), self._callback, None)

    def check(self) -> None:
        """Raise the first exception of the function."""
        if self._failures:
            raise self._failures[0]

    def _answer(self, size: int, logits: Any, count: int, tokens: Any, _user: Any) -> None:
        token = 0
        try:
            if not self._failures:
                token = self._choose(ctypes.string_at(logits, size))
        except BaseException as error:  # noqa: BLE001  (raised again by `check`)
            self._failures.append(error)
        for index in range(count):
            tokens[index] = token


def run(options: argparse.Namespace, stop: genie_api.Stop) -> None:
    """Decode the windows of the options, and write the files that they name."""
    text = genie_t2t_run.c_string(
        genie_api.read_file(options.config, "configuration"), "the configuration"
    )
    windows = read_windows(options.windows)
    genie = genie_api.Genie(stop=stop)
    with open(options.output_file, "wb") as sink, genie_api.Resources() as resources:
        log = resources.add(genie_api.LogHandle(genie, options.log)) if options.log else None
        steps = LogitsSampler(sink)
        sampler = SamplerCallback(genie, SAMPLER, steps)
        profile = None
        if options.trace is not None:
            profile = resources.add(genie_api.ProfileHandle(genie, trace=True))
        config = resources.add(genie_api.DialogConfigHandle(genie, text))
        config.bind(log, profile)
        dialog = resources.add(genie_api.DialogHandle(config))
        for number, window in enumerate(windows, start=1):
            steps.follow(window.following)
            dialog.token_query(window.prompt, lambda _ids: None)
            sampler.check()
            if steps.done != len(window.following):
                raise genie_api.FatalError(
                    f"window {number}: {steps.done} steps of {len(window.following)}"
                )
            dialog.reset()
            print(f"window {number}/{len(windows)}: {steps.done} steps", flush=True)
        if profile is not None:
            genie_t2t_run.write_profile(profile, None, options.trace, dialog.answers)
    summary = {
        "format": _FORMAT,
        "step_bytes": steps.step_bytes,
        "steps": [len(window.following) for window in windows],
    }
    genie_t2t_run.write_file(json.dumps(summary).encode(), options.summary, "summary")


def main(arguments: Optional[Sequence[str]] = None, stop: Optional[genie_api.Stop] = None) -> int:
    """Run the program and return its exit status."""
    options = parser().parse_args(arguments)
    try:
        run(options, stop or genie_api.Stop())
    except (genie_api.FatalError, OSError) as error:
        return genie_t2t_run.fail("genie-logits", error)
    return 0


if __name__ == "__main__":
    genie_api.leave(main(stop=genie_api.Stop.watching()))
