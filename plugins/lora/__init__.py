"""LoRA as Genie takes it: low-rank branches in the graph, adapters as files beside it."""
