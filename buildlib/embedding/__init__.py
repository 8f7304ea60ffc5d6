"""The embedding table on the host: taken out of the graph, and looked up there by Genie."""
