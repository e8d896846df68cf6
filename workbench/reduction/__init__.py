"""Reduction of per-token values to one number: weights of the whole step, and typed partial sums."""
