"""Exports of `qai_hub_models`' own Llama classes (BSD-3-Clause), with random weights.

The classes, their interface, the exporter's arguments and the graph optimiser are the package's;
only the checkpoint is ours, and the call of the exporter, because the package refuses the
version of torch that is installed here.
"""

import multiprocessing
import shutil
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import onnx
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from tools.exports.encodings import save_encodings
from tools.exports.genie import Cache, mask, names, rope
from tools.exports.models import RECIPES, make_model, sample_tokens
from tools.exports.sample import Step, check_steps, save_sample, whole_text


@dataclass(frozen=True)
class Export:
    """One fixture.

    Attributes:
        shape: (AR, CL) of the example, and of the graph when it is fixed.
        dynamo: as the package exports now, with symbolic dimensions; else with the older exporter
            and fixed ones, as it did before.
        sha: one attention per head, the package's default.
    """

    shape: tuple[int, int]
    dynamo: bool
    sha: bool
    encodings: bool = False


EXPORTS = {
    "aihub-llama": Export((4, 16), dynamo=True, sha=True, encodings=True),
    "aihub-llama-mha-fixed": Export((4, 16), dynamo=False, sha=False),
}


def make(name: str, folder: Path) -> str:
    """Write one fixture; returns a line on it."""
    export = EXPORTS[name]
    recipe = RECIPES["llama"]
    plain = make_model(recipe, "eager")
    tokens = sample_tokens(recipe)
    whole = whole_text(plain, tokens)
    with tempfile.TemporaryDirectory() as checkpoint:
        plain.save_pretrained(checkpoint)
        vocabulary = {f"t{i}": i for i in range(plain.config.vocab_size)}
        tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="t0"))
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t2").save_pretrained(
            checkpoint
        )
        module = _load(Path(checkpoint), export)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    path = folder / "model.onnx"
    steps = _steps(module, plain.config, tokens, export.shape)
    _export(module, path, steps[0], export)
    worst = check_steps(path, steps)
    save_sample(folder / "sample.npz", whole, steps)
    plain.config.save_pretrained(folder)
    if export.encodings:
        save_encodings(path, [inputs for inputs, _ in steps], "1.0.0")
    for file in folder.iterdir():
        file.chmod(0o644)
    size = sum(file.stat().st_size for file in folder.iterdir())
    return f"{name}: {size} bytes, ONNX Runtime differs from torch by {worst:.1e}"


def _load(checkpoint: Path, export: Export) -> torch.nn.Module:
    from qai_hub_models.models.templates.llama3.model import Llama3Base
    from qai_hub_models.models.templates.llm.common import LLMIOType

    class Llama(Llama3Base):
        min_memory_recommended = 0
        llm_io_type = LLMIOType.genie_input_ids

        @classmethod
        def from_pretrained(cls, *_args: object, **_kwargs: object) -> "Llama":
            raise NotImplementedError

        def get_output_spec(self) -> object:
            return self._get_output_spec(self.llm_config.num_hidden_layers)

    skipped = None if export.sha else ["sha_attention"]
    ar, cl = export.shape
    return Llama(checkpoint, ar, cl, _skip_optimizations=skipped).eval()


def _steps(
    module: torch.nn.Module, config: object, tokens: torch.Tensor, shape: tuple[int, int]
) -> list[Step]:
    """Return the text in chunks of AR tokens, the past filled from its end."""
    ar, cl = shape
    cache = Cache.empty(config, cl - ar)
    inputs, outputs = names(config)
    steps: list[Step] = []
    for done in range(0, tokens.shape[1], ar):
        chunk = tokens[:, done : done + ar].int()
        cos, sin = rope(config, torch.arange(done, done + ar))
        feed = (chunk, mask(done, ar, cl), cos, sin, *cache.tensors)
        answer = module(*feed)
        given = dict(zip(inputs, feed, strict=True))
        steps.append((given, dict(zip(outputs, answer, strict=True))))
        cache = cache.grown(list(answer[1:]))
    return steps


def _export(module: torch.nn.Module, path: Path, example: Step, export: Export) -> None:
    from qai_hub_models.models.templates.llm.onnx_optimize import optimize_onnx_model

    given, wanted = example
    args = tuple(given.values())
    if not export.dynamo:
        torch.onnx.export(
            module,
            args,
            path,
            dynamo=False,
            input_names=list(given),
            output_names=list(wanted),
            opset_version=17,
        )
        return
    free = torch.export.Dim.DYNAMIC
    rest = [{2: free}, {2: free}]
    rest += [{3: free} if "key" in name else {2: free} for name in list(given)[4:]]
    torch.onnx.export(
        module,
        args,
        path,
        dynamo=True,
        optimize=False,
        input_names=list(given),
        output_names=list(wanted),
        dynamic_shapes=({1: free}, {2: free, 3: free}, tuple(rest)),
        opset_version=18,
        verbose=False,
    )
    model = onnx.load(path)
    for file in path.parent.glob("model.onnx*"):
        file.unlink()
    model = optimize_onnx_model(model)
    for node in model.graph.node:
        del node.metadata_props[:]
    for value in (*model.graph.value_info, *model.graph.input, *model.graph.output):
        del value.metadata_props[:]
    del model.graph.metadata_props[:]
    onnx.save_model(
        model,
        path,
        save_as_external_data=True,
        all_tensors_to_one_file=True,
        location="model.data",
    )


def main() -> None:
    """Arguments: the folder of all fixtures, then names of fixtures (all when none).

    Each is made in a process of its own, because the package rewrites classes of transformers.
    """
    out = Path(sys.argv[1])
    chosen = sys.argv[2:] or list(EXPORTS)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool:
        for line in pool.map(make, chosen, [out / name for name in chosen]):
            print(line, flush=True)


if __name__ == "__main__":
    main()
