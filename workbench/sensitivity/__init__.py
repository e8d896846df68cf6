"""The mutation score of a parity check: the known bugs that a comparison rejects, and those that it would accept.

A fault of `workbench.faults` is *admissible* in an ablation if one of its measured runs calls the fault's seam. It is
planted in one run of the ablation, whose baseline stays clean; it is *killed* if the comparison of the two, with the
budgets of `workbench.compare`, does not agree, and *survives* if it does. The score is killed / admissible.

Every fault is planted in one run, a small one in which it is predicted to show if there is any. Predictions come from
facts that are known before any fault is planted (`facts`, `needs`): counts of the data, settings, and what the clean
run has met. For a survivor the missing facts are the reasons, and `remedies` measures the change that provides them.

What the score does not see: a bug that baseline and run have in common, as both call the same code; backends, whose
order and asynchrony simulated ranks do not have; parameters that FSDP2 shards.
"""

from workbench.sensitivity.gates import Gate, GateScore, Tolerance
from workbench.sensitivity.record import FaultResult, Remedy, Sensitivity

__all__ = ["FaultResult", "Gate", "GateScore", "Remedy", "Sensitivity", "Tolerance"]
"""The function that measures is `workbench.sensitivity`, that is `workbench.mutation_score.sensitivity`."""
