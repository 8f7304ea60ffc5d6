"""A Hugging Face checkpoint folder, read lazily and trusted in nothing."""
