"""Runtimes of others: llama.cpp, GenieX, ExecuTorch, and what PowerServe was built for."""
