"""Workloads: what can be done with a container on a leased device, and what is measured."""
