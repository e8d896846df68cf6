"""Log-probabilities from a GEMM whose epilogue writes exponentials instead of logits (Triton)."""
