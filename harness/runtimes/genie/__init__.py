"""Genie, the vendor's runtime: conversations, scores, embeddings and logits of its programs."""
