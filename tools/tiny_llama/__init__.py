"""How the reference model of `suites/models/tiny_llama` was made, and what measures it."""
