"""Metrics of miles, by its definitions: those of slime. Read from radixark/miles 31f1ca96.

It also reports `ess_ratio`, `train_rollout_logprob_abs_diff` and `train_rollout_kl`, which are not recomputed.
"""

from workbench.systems.slime.metrics import LEFT_OUT, names

__all__ = ["LEFT_OUT", "names"]
