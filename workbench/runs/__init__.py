"""One run: its spec, its step (`step.py`, read this first), its rank process and its directory on disk."""
