"""Plans: a matrix of containers, devices and workloads, run on a pool and journaled."""
