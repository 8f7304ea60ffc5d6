"""Hugging Face checkpoint folder, read lazily and checked before use."""
