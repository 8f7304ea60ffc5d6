"""Training of heads and tokens for speculation; the model itself stays as it is.

Modules here need torch and transformers (extra `train`).
"""
