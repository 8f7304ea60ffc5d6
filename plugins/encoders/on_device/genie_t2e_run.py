#!/usr/bin/env python3
"""Text embedding with libGenie: the documented command line of the SDK's ``genie-t2e-run``.

For devices without an SDK binary: x86-64 (the emulator) and Linux boards. ``--prompts_file`` and
``--summary`` are ours. Standard library only, Python 3.8+. Exit status: 0 success, 1 Genie failed,
2 wrong use.
"""

import argparse
import json
import os
import time
from typing import IO, TYPE_CHECKING, Dict, List, Optional, Sequence, Tuple

if TYPE_CHECKING:
    from device_scripts import genie_api, genie_t2t_run
else:  # beside this file on the device
    import genie_api
    import genie_t2t_run

_FORMAT = 2


def parser() -> argparse.ArgumentParser:
    """Return the parser of the documented options, and of ours."""
    build = argparse.ArgumentParser(prog="genie-t2e-run", allow_abbrev=False, description=__doc__)
    build.add_argument("-c", "--config", metavar="FILE", required=True, help="embedding JSON")
    prompt = build.add_mutually_exclusive_group(required=True)
    prompt.add_argument("-p", "--prompt", metavar="VAL", help="the text")
    prompt.add_argument("--prompt_file", metavar="FILE", help="file that holds the text")
    prompt.add_argument(
        "--prompts_file", metavar="FILE", help="JSON array of texts, one after another (ours)"
    )
    build.add_argument(
        "--output_file", metavar="FILE", default="output.raw", help="float32 values, text by text"
    )
    build.add_argument(
        "--summary", metavar="FILE", help="write a JSON line on each embedding (ours)"
    )
    build.add_argument("--log", choices=tuple(genie_api.LOG_LEVELS), help="Genie's own log")
    build.add_argument("--profile", metavar="FILE", help="write Genie's profile JSON")
    build.add_argument(
        "--trace", metavar="FILE", help="write a trace that Perfetto reads (option of ours)"
    )
    return build


def read_prompts(options: argparse.Namespace) -> List[bytes]:
    """Return the texts that the options name."""
    if options.prompts_file is not None:
        try:
            texts = json.loads(genie_api.read_file(options.prompts_file, "prompts file"))
        except (ValueError, RecursionError) as error:
            raise genie_api.FatalError(f"the prompts file is no JSON: {error}") from error
        if not isinstance(texts, list) or not texts or not all(type(t) is str for t in texts):
            raise genie_api.FatalError("the prompts file is no JSON array of texts")
        prompts = [text.encode("utf-8", "surrogatepass") for text in texts]
    elif options.prompt_file is not None:
        prompts = [genie_api.read_file(options.prompt_file, "prompt file")]
    else:
        prompts = [os.fsencode(options.prompt)]
    return [genie_t2t_run.c_string(text, "the prompt") for text in prompts]


def embed(
    embedding: genie_api.EmbeddingHandle,
    prompts: Sequence[bytes],
    output: IO[bytes],
    summary: IO[bytes],
) -> List[Tuple[int, ...]]:
    """Embed texts one after another, write each before the next begins, and return their shapes.

    A line of the summary stands for values that `output` holds.
    """
    shapes, progress = [], genie_api.ProgressFile()
    for number, prompt in enumerate(prompts, start=1):
        progress.tell(f"text {number}/{len(prompts)}")
        began = time.monotonic()
        vectors = embedding.generate(prompt)
        seconds = round(time.monotonic() - began, 6)
        _append(vectors.data, output)
        _append(_line({"shape": vectors.shape, "seconds": seconds}), summary)
        shapes.append(vectors.shape)
    return shapes


def _line(values: Dict[str, object]) -> bytes:
    return json.dumps(values).encode() + b"\n"


def _append(data: bytes, file: IO[bytes]) -> None:
    try:
        file.write(data)
        file.flush()
    except OSError as error:
        raise genie_api.FatalError(f"cannot write {file.name}: {error}") from error


def _open(path: str) -> IO[bytes]:
    try:
        return open(path, "wb")
    except OSError as error:
        raise genie_api.FatalError(f"cannot write {path}: {error}") from error


def run(options: argparse.Namespace, stop: genie_api.Stop) -> None:
    """Embed the texts of the options, and write the files that they name."""
    text = genie_t2t_run.c_string(
        genie_api.read_file(options.config, "configuration"), "the configuration"
    )
    prompts = read_prompts(options)
    genie = genie_api.Genie(stop=stop)
    genie_t2t_run.write(f"Using libGenie.so version {genie.version()}\n\n".encode())
    with genie_api.Resources() as resources:
        log, profile = genie_t2t_run.observe(resources, genie, options)
        config = resources.add(genie_api.EmbeddingConfigHandle(genie, text))
        config.bind(log, profile)
        began = time.monotonic()
        embedding = resources.add(genie_api.EmbeddingHandle(config))
        init_s = round(time.monotonic() - began, 6)
        with _open(options.output_file) as output, _open(options.summary or os.devnull) as summary:
            _append(_line({"format": _FORMAT, "init_s": init_s}), summary)
            shapes = embed(embedding, prompts, output, summary)
        if profile is not None:
            genie_t2t_run.write_profile(profile, options.profile, options.trace)
    for prompt, shape in zip(prompts, shapes):
        genie_t2t_run.show_embedding(prompt, shape)


def main(arguments: Optional[Sequence[str]] = None, stop: Optional[genie_api.Stop] = None) -> int:
    """Run the program and return its exit status."""
    options = parser().parse_args(arguments)
    try:
        run(options, stop or genie_api.Stop())
    except (genie_api.FatalError, BrokenPipeError) as error:
        return genie_t2t_run.fail("genie-t2e-run", error)
    return 0


if __name__ == "__main__":
    genie_api.leave(main(stop=genie_api.Stop.watching()))
