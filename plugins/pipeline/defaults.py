"""A first recipe for a model, for people to change."""

import json
from pathlib import Path

from buildlib.builder.options import DEFAULT_CONTEXT, DEFAULT_PREFILL
from buildlib.checkpoint.layout import CONFIG_FILE, read_json
from buildlib.errors import ModelFileError
from buildlib.quantize.options import RECIPES
from buildlib.targets import parse_target

_TEXT_FILE = "text/heldout.txt"  # not the one that quantization is calibrated on

_TEXT = """\
# A recipe of `qnnfarm pipeline run`; plugins/pipeline/pipeline.md explains every key.
model_id_or_path: {model}
soc_details: {target}{remark}

generator_config:
  sequence_length: {ar}    # tokens of one prefill call
  context_length: {cl}   # tokens of prompt and answer together

{metrics}
stages:
  model_loader: {{}}
  quantization:
    recipe_name: w8a16   # {recipes}
  genai_builder: {{}}
"""
_METRICS = """\
evaluator_config:
  metrics:
    - name: perplexity
      dataset: {text}    # a file beside the recipe, or in the model's folder
      display_name: PPL
      windows: 8
"""
_NO_METRICS = """\
# evaluator_config:
#   metrics:
#     - name: perplexity
#       dataset: heldout.txt    # a text beside the recipe that the model has not seen
"""


def recipe_text(model: str, target: str) -> str:
    """Return the text of a recipe for a model and a target."""
    from buildlib.builder.model_place import find_model

    soc = parse_target(target)
    place = find_model(model)
    folder = place.folder
    positions = _positions(folder)
    cl = min(DEFAULT_CONTEXT, positions)
    ar = DEFAULT_PREFILL if cl > 2 * DEFAULT_PREFILL else max(1, min(32, cl // 4))
    has_text = (folder / _TEXT_FILE).is_file()
    local = Path(model).expanduser().exists()
    return _TEXT.format(
        model=json.dumps(str(place.file or place.path) if local else model),
        target=str(soc),
        remark="   # the emulator; the phone is " + soc.soc.name if soc.emulator else "",
        ar=ar,
        cl=cl,
        metrics=_METRICS.format(text=_TEXT_FILE) if has_text else _NO_METRICS,
        recipes="or " + ", ".join(name for name in RECIPES if name != "w8a16"),
    )


def _positions(folder: Path) -> int:
    path = folder / CONFIG_FILE
    config = read_json(path)
    if not isinstance(config, dict):
        raise ModelFileError(path, "it holds no JSON object")
    positions = config.get("max_position_embeddings")
    return positions if type(positions) is int and positions > 1 else DEFAULT_CONTEXT
