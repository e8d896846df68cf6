"""Loss alignment for a trainer that is not ours: whole sums, means, ratios and statistics over its own ranks.

`workbench.parallel_loss.align.align_loss` is the door.
"""
