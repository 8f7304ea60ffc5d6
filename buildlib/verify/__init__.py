"""Verification that a build computes what its source computes, stage by stage."""
