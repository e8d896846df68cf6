"""Settings as data: runs, losses, ablations. Imports no torch."""
