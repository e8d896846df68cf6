"""Where tokens, heads and sums lie: mesh axes, shard plans, collectives with stated adjoints, attention, tp."""
