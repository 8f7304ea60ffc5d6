"""LoRA adapters of the reference model."""
