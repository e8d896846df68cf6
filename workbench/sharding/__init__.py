"""Mesh axes, shard plans, collectives with stated adjoints, sharded attention, tensor parallelism."""
