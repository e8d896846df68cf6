"""Training: the step (`step.py`, read this first), the rank process, online runs."""
