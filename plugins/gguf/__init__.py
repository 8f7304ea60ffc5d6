"""GGUF files as checkpoints in Hugging Face layout: configuration, tokenizer, weights."""
