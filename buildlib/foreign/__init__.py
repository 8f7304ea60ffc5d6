"""Artifacts of other runtimes: files of theirs in, containers for the runtime `graph` out."""
