"""Rollouts: the batch, its files and importers, tasks with checkable rewards, packing and targets."""
