"""How other people export language models, done for real and small."""
