"""Training of what speculation needs beside a model, which itself stays as it is.

Modules here need torch and transformers (extra `train`).
"""
