"""Prove a training engine: its steps, seen from outside, under changes that must not matter.

An engine is a callable from cases (documents, micro-batches, ranks, padding) to steps (weights before and after,
reported loss and norm), or a script that runs one in an environment of its own. This package imports neither pydantic
nor transformers, so that a driver script can import it next to another system's packages.
"""
