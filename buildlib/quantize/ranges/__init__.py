"""Estimators of the ranges of activations."""
