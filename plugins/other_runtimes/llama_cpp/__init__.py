"""llama.cpp on devices: its programs over a GGUF, by whatever backend the user's build has."""
