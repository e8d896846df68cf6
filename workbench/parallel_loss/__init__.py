"""Loss alignment for external trainers: global sums, means, ratios and statistics over the trainer's own ranks.

`workbench.parallel_loss.align.align_loss` is the public API.
"""
