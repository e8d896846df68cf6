"""Slow, obvious, float64, from the papers. Nothing here imports workbench, and a test checks it."""
