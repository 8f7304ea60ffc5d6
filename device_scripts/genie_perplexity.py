#!/usr/bin/env python3
"""Perplexity of a model on texts, by Genie's accuracy API, one window of the context at a time.

``GenieAccuracy_compute`` hangs when one dialog evaluates more than one window. So each window is a
file, evaluated on a fresh dialog in a child process under a watchdog; the results are combined.
README.md beside this file defines windows, and the tokens of them that Genie scores. Standard
library only, Python 3.8+. Exit status: 0 done, 1 failed, 2 wrong use.
"""

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

if TYPE_CHECKING:
    from device_scripts import genie_api, genie_t2t_run, genie_trace
else:  # beside this file on the device
    import genie_api
    import genie_t2t_run
    import genie_trace

_FORMAT = 1
_POSITIONS = "first_cl_minus_ar"


class WindowResult(NamedTuple):
    """Genie's result for one window.

    Attributes:
        perplexity: Over the scored tokens.
        tokens: Of the text, by Genie's tokenizer, without the bos token.
        tokens_sha256: Of the ids in decimal, joined by spaces, so that a host can check that it
            scores the same tokens.
        retries: How many times the evaluation took too long and was started again.
    """

    file: str
    perplexity: float
    tokens: int
    tokens_sha256: str
    retries: int
    seconds: float


def context_length(config: bytes) -> int:
    """Return ``dialog.context.size`` of a configuration."""
    try:
        size = json.loads(config)["dialog"]["context"]["size"]
    except (ValueError, KeyError, TypeError, RecursionError):
        size = None
    if not isinstance(size, int) or isinstance(size, bool) or size < 2:
        raise genie_api.FatalError("the configuration has no dialog.context.size")
    return size


def has_bos(config: bytes) -> bool:
    """Return whether Genie puts a token before a text: ``dialog.context.bos-token`` is not -1."""
    return int(json.loads(config)["dialog"]["context"].get("bos-token", -1)) >= 0


def accuracy_json(config: bytes, window: str, role: Optional[str]) -> bytes:
    """Return the accuracy configuration for a window.

    A dialog that speculates is scored as a basic one of one of its models: the accuracy API takes
    no other (`engine.convert-to-basic`). Only dialogs of two engines have roles.
    """
    dialog = json.loads(config)["dialog"]
    engines = dialog.get("engine")
    roles = [each.get("role") for each in engines] if isinstance(engines, list) else []
    if role == "draft" and role not in roles:
        kind = dialog.get("type", "basic")
        raise genie_api.FatalError(f"a dialog of type {kind} has no draft model: no --role draft")
    config_json: Dict[str, Any] = {"dataset": window, "type": "perplexity"}
    if dialog.get("type", "basic") != "basic":
        config_json["engine"] = {"convert-to-basic": True}
        if roles:
            config_json["engine"]["role"] = role or "target"
    return json.dumps(config_json).encode()


def evaluate(options: argparse.Namespace) -> Dict[str, Any]:
    """Evaluate one window in this process, which may hang or abort: run it in a child."""
    (window,) = options.window_files
    text = genie_t2t_run.c_string(genie_api.read_file(window, "window"), "the window")
    config_text = genie_api.read_file(options.config, "configuration")
    length = context_length(config_text)
    genie = genie_api.Genie()
    accuracy_text = accuracy_json(config_text, window, options.role)
    with genie_api.Resources() as resources:
        log = resources.add(genie_api.LogHandle(genie, options.log)) if options.log else None
        profile = (
            resources.add(genie_api.ProfileHandle(genie, trace=True)) if options.trace else None
        )
        config = resources.add(genie_api.DialogConfigHandle(genie, config_text))
        config.bind(log, profile)
        dialog = resources.add(genie_api.DialogHandle(config))
        tokens = dialog.encode(text)
        # Genie puts bos before the text, drops what fills no whole window, and needs one.
        least = length - 1 if has_bos(config_text) else length
        if not least <= len(tokens) < least + length:
            raise genie_api.FatalError(
                f"{window} has {len(tokens)} tokens; one window of context {length} needs "
                f"{least} to {least + length - 1}"
            )
        if options.lora:
            adapter, tensor, strength = options.lora
            dialog.apply_lora("primary", adapter)
            dialog.set_lora_strength("primary", tensor, strength)
        accuracy_config = resources.add(genie_api.AccuracyConfigHandle(genie, accuracy_text))
        accuracy = resources.add(genie_api.AccuracyHandle(accuracy_config, dialog))
        began = time.monotonic_ns()
        result = json.loads(accuracy.compute())
        if profile is not None:
            event = genie_trace.call("GenieAccuracy_compute", began)
            _, traced = genie_trace.split_profile(profile.json())
            trace = genie_trace.document(traced, calls=[event])
            genie_t2t_run.write_file(trace, options.trace, "trace")
    ids = " ".join(map(str, tokens)).encode()
    return {
        "perplexity": result["perplexity"],
        "tokens": len(tokens),
        "tokens_sha256": hashlib.sha256(ids).hexdigest(),
        "version": genie.version(),
    }


def _child(options: argparse.Namespace) -> int:
    """Run as the child; the answer has its own pipe, since Genie prints to stdout and stderr."""
    answer = json.dumps(evaluate(options))
    genie_t2t_run.flush_c()
    with os.fdopen(options.answer_fd, "w") as pipe:
        pipe.write(answer)
    # Without Genie's exit handlers: the answer is out, and a hang in them would cost a retry.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_child(options: argparse.Namespace, window: str) -> Optional[Dict[str, Any]]:
    """Evaluate one window in a child process; return None if it took too long.

    Its trace, if one is asked for, is in the file of `child_trace` then.
    """
    reader, writer = os.pipe()
    try:
        command = [sys.executable, __file__, "-c", options.config]
        command += ["--ar", "1", "--out", os.devnull]
        command += ["--role", options.role] if options.role else []
        command += ["--lora", "{},{},{!r}".format(*options.lora)] if options.lora else []
        command += ["--log", options.log] if options.log else []
        command += ["--trace", child_trace(options)] if options.trace else []
        command += ["--answer-fd", str(writer), "--window-files", window]
        try:
            status = subprocess.run(
                command,
                pass_fds=(writer,),
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                timeout=options.timeout,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return None
        finally:
            os.close(writer)
            writer = -1
        if status != 0:
            died = f"died of signal {-status}" if status < 0 else "failed (its error is above)"
            raise genie_api.FatalError(f"the evaluation of {window} {died}")
        with os.fdopen(reader, "rb") as pipe:
            reader = -1
            answer = json.loads(pipe.read())
        if not isinstance(answer, dict):
            raise genie_api.FatalError(f"the evaluation of {window} answered nonsense")
        return answer
    finally:
        for descriptor in (reader, writer):
            if descriptor >= 0:
                os.close(descriptor)


def child_trace(options: argparse.Namespace) -> str:
    """Return the file of a child's trace."""
    return f"{options.trace}.child"


def measure(options: argparse.Namespace, window: str) -> Tuple[WindowResult, str]:
    """Evaluate one window, again if it takes too long; add Genie's version."""
    for retries in range(options.retries + 1):
        began = time.monotonic()
        answer = run_child(options, window)
        seconds = time.monotonic() - began
        if answer is None:
            words = f"{window}: no result after {options.timeout:g} s"
            print(words, file=sys.stderr, flush=True)
            continue
        perplexity = answer.get("perplexity")
        if not isinstance(perplexity, (int, float)) or not 0 < perplexity < math.inf:
            raise genie_api.FatalError(f"Genie's perplexity of {window} is {perplexity}")
        result = WindowResult(
            window,
            float(perplexity),
            int(answer["tokens"]),
            str(answer["tokens_sha256"]),
            retries,
            round(seconds, 3),
        )
        return result, str(answer["version"])
    raise genie_api.FatalError(
        f"{window} had no result after {options.timeout:g} s, {options.retries + 1} times"
    )


def combine(windows: Sequence[WindowResult], length: int, ar: int, version: str) -> Dict[str, Any]:
    """Return the result: exp of the mean negative log-likelihood of all scored tokens."""
    scored = length - ar  # in each window, so that the windows weigh the same
    mean = sum(math.log(window.perplexity) for window in windows) / len(windows)
    return {
        "format": _FORMAT,
        "perplexity": math.exp(mean),
        "positions": _POSITIONS,
        "context_length": length,
        "ar": ar,
        "n_windows": len(windows),
        "n_tokens": scored * len(windows),
        "retries": sum(window.retries for window in windows),
        "genie_version": version,
        "windows": [window._asdict() for window in windows],
    }


def run(options: argparse.Namespace) -> None:
    """Evaluate all windows and write the result atomically."""
    length = context_length(genie_api.read_file(options.config, "configuration"))
    if not 0 < options.ar < length:
        raise genie_api.FatalError(f"--ar must lie between 1 and {length - 1}")
    windows: List[WindowResult] = []
    traces: List[bytes] = []
    version = ""
    progress = genie_api.ProgressFile()
    for number, file in enumerate(options.window_files, start=1):
        progress.tell(f"window {number}/{len(options.window_files)}")
        window, version = measure(options, file)
        windows.append(window)
        if options.trace:
            traces.append(genie_api.read_file(child_trace(options), "trace of a child"))
        total = len(options.window_files)
        print(f"window {number}/{total} perplexity={window.perplexity:.6g}", flush=True)
    result = combine(windows, length, options.ar, version)
    if options.trace:
        genie_t2t_run.write_file(b"".join(line + b"\n" for line in traces), options.trace, "trace")
    genie_t2t_run.write_file((json.dumps(result, indent=1) + "\n").encode(), options.out, "result")
    print(f"perplexity={result['perplexity']:.6g} windows={len(windows)}", flush=True)


def parser() -> argparse.ArgumentParser:
    """Return the option parser; ``--answer-fd`` is between this program and its children."""
    build = argparse.ArgumentParser(
        prog="genie-perplexity", allow_abbrev=False, description=__doc__
    )
    build.add_argument("-c", "--config", metavar="FILE", required=True, help="dialog JSON")
    build.add_argument("--ar", type=int, required=True, help="prefill AR of the model")
    build.add_argument("--window-files", metavar="FILE", nargs="+", required=True, help="texts")
    build.add_argument("--out", metavar="FILE", required=True, help="result JSON")
    build.add_argument(
        "--role", choices=("target", "draft"), help="which model of a dialog that has two"
    )
    build.add_argument("--log", choices=tuple(genie_api.LOG_LEVELS), help="Genie's own log")
    build.add_argument(
        "--trace", metavar="FILE", help="write the trace of each window, one on a line"
    )
    build.add_argument(
        "-l",
        "--lora",
        type=genie_t2t_run.lora,
        metavar="ADAPTER_NAME,ALPHA_TENSOR_NAME,ALPHA_VALUE",
        help="LoRA adapter and its strength",
    )
    build.add_argument("--timeout", type=float, default=60.0, help="seconds for a try of a window")
    build.add_argument("--retries", type=int, default=3, help="of a window that takes longer")
    build.add_argument("--answer-fd", type=int, help=argparse.SUPPRESS)
    return build


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the program and return its exit status."""
    build = parser()
    options = build.parse_args(arguments)
    if not 0 < options.timeout <= 86400 or not 0 <= options.retries <= 100:
        build.error("--timeout must be 0 to 86400 s, --retries 0 to 100")
    try:
        if options.answer_fd is not None:
            return _child(options)
        run(options)
    except (genie_api.FatalError, OSError, ValueError, KeyError) as error:
        return genie_t2t_run.fail("genie-perplexity", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
