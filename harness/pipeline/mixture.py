"""Mixtures of precisions: as pipelines that build them, and as folders of models."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buildlib.checkpoint.layout import ENCODINGS_FILE, MODEL_FILE
from buildlib.encodings.files import load_encodings, save_encodings
from buildlib.graph.files import load_model, save_model, tensor_array
from buildlib.pipeline.model_folder import link_configuration
from buildlib.quantize.mixed_precision.proposal import Proposal, mixed_encodings
from buildlib.quantize.mixed_precision.sweep import Quantized, changed_weights
from buildlib.quantize.tensor_writer import TensorWriter, replace_constant
from harness.errors import PipelineError
from harness.pipeline.bisection import as_option
from harness.pipeline.llm import LLMPipeline
from harness.pipeline.recipe import Recipe
from harness.pipeline.stages import Quantization

QUANTIZATION, BUILDER = "quantization", "genai_builder"
RAISED = "raised.safetensors"
"""Weights that a technique had changed for 4 bits, as the model in float has them."""
_EMULATOR = ":emulator"


@dataclass
class MixtureMaker:
    """Pipelines of proposals.

    Attributes:
        whole: folder of the model in float.
        folder: of the quantized model.
        encodings: of that, by name.
        scratch: folder for models of mixtures.
    """

    pipe: LLMPipeline
    whole: Path
    folder: Path
    encodings: Quantized
    scratch: Path

    def pipeline(self, proposal: Proposal) -> LLMPipeline:
        """Return a pipeline of a proposal, for the emulator; it has run no stage."""
        data = copy.deepcopy(dict(self.pipe.manifest.recipe))
        if self._takes_options():
            options = data["stages"][QUANTIZATION].setdefault("options", {})
            given = options.get("mixed_precision", ())
            options["mixed_precision"] = [*given, *as_option(proposal)]
            return _for_emulator(self.pipe, str(self.pipe.model_dir), data)
        place = self.scratch / str(len(proposal.raised)) / self.pipe.model_name
        if not place.exists():
            write_mixture(self.whole, self.folder, proposal, self.encodings, place)
        stages = {"model_loader": {}, QUANTIZATION: {"recipe_name": "w8a16"}}
        if BUILDER in data["stages"]:
            stages[BUILDER] = data["stages"][BUILDER]
        return _for_emulator(self.pipe, str(place), {**data, "stages": stages})

    def export(self, proposal: Proposal, out: Path) -> None:
        """Write the model of a proposal."""
        mixed = self.pipeline(proposal)
        mixed.construct(until=last_before_builder(mixed))
        mixed.export(out)

    def _takes_options(self) -> bool:
        """Return whether the recipe's own stage can mix: own encodings follow no option."""
        quantizes = self.pipe.config.stages.get(QUANTIZATION) is Quantization
        return quantizes and not (self.whole / ENCODINGS_FILE).is_file()


def write_mixture(
    float_model: Path, quantized: Path, proposal: Proposal, encodings: Quantized, out: Path
) -> Path:
    """Write the model of a proposal as the folder that `qnnfarm build` takes.

    Args:
        float_model: folder of the model in float, whose weights the raised tensors have.
        quantized: folder of the quantized model, which gives everything else.
        proposal: what is raised.
        encodings: of the quantized model, by name.
        out: new folder.

    Raises:
        ModelFileError: the models cannot be read, or `out` not be written.
    """
    model = load_model(quantized / MODEL_FILE)
    changed = changed_weights(float_model / MODEL_FILE, quantized / MODEL_FILE)
    original = load_model(float_model / MODEL_FILE).graph.initializers
    back = {n: t for n in proposal.bits if n in changed and (t := original[n].const_value)}
    out.mkdir(parents=True, exist_ok=True)
    if back:
        shapes = {name: tuple(tensor.shape.numpy()) for name, tensor in back.items()}
        with TensorWriter(out / RAISED, shapes) as writer:
            for name, tensor in back.items():
                writer.write(name, tensor_array(tensor))
                replace_constant(model.graph, name, writer.tensor(name))
    save_model(model, out / MODEL_FILE)
    given = load_encodings(quantized / ENCODINGS_FILE)
    mixed = mixed_encodings(encodings, proposal.raised)
    groups = ("activation_encodings", "param_encodings")
    update = {group: tuple(mixed[e.name] for e in getattr(given, group)) for group in groups}
    save_encodings(given.model_copy(update=update), out / ENCODINGS_FILE)
    link_configuration(quantized, out)
    return out


def last_before_builder(pipe: LLMPipeline) -> str:
    """Return the name of the stage whose output is ranked.

    Raises:
        PipelineError: the recipe has nothing between loading and building.
    """
    names = list(pipe.config.stages)
    last = names.index(BUILDER) - 1 if BUILDER in names else len(names) - 1
    if last < 1:
        raise PipelineError("the recipe has no stage that quantizes the model")
    return names[last]


def _for_emulator(pipe: LLMPipeline, model: str, data: dict[str, Any]) -> LLMPipeline:
    target = data.get("soc_details")
    if target is not None and not target.endswith(_EMULATOR):
        data["soc_details"] = target + _EMULATOR
    data["cache_dir"] = str(pipe.cache_root)
    data.pop("enable_cache", None)
    data.pop("model_id_or_path", None)
    recipe = Recipe(data)
    recipe.path = pipe.config.folder / "recipe.yaml"
    return LLMPipeline.from_pretrained(model, recipe=recipe)
