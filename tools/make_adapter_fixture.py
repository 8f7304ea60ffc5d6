"""Make `tests/fixtures/adapters/patterns`: an adapter of the reference model, saved by peft.

Run it where torch, transformers and peft are installed: `python -m tools.make_adapter_fixture`. The
suite compares the logits of a graph with this adapter with those of torch and peft.
"""

from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests/fixtures/adapters/patterns"
MODEL = ROOT / "suites/models/tiny_llama"
TOKENS = (0, 300, 17, 512, 90, 41, 7, 1100)
STORED = 64  # logits of a position


def main() -> None:
    """Write adapter and logits."""
    torch.manual_seed(0)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=2,
        lora_alpha=4,
        use_rslora=True,
        lora_dropout=0.1,
        target_modules=["q_proj", "down_proj"],
        rank_pattern={"down_proj": 1},
        alpha_pattern={"^model.layers.1.*": 1, "layers.2.mlp.down_proj": 2},
    )
    model = get_peft_model(_base(), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
            if "lora" in name:
                parameter.copy_(parameter.bfloat16())
    model.peft_config["default"].base_model_name_or_path = MODEL.name
    model.save_pretrained(FOLDER)
    loaded = PeftModel.from_pretrained(_base(), FOLDER).eval()
    logits = loaded(torch.tensor([TOKENS])).logits[0, :, :STORED]
    np.save(FOLDER / "logits.npy", logits.detach().numpy())
    (FOLDER / "README.md").unlink(missing_ok=True)  # the template of a model card


def _base() -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


if __name__ == "__main__":
    main()
