"""Stages of a build, from a model folder to a container, run through the cache."""
