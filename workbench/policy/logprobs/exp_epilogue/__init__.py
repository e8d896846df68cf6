"""Log-probabilities from a matrix product that writes exponentials instead of logits (Triton)."""
