"""linkedin/Liger-Kernel: losses fused with the output head, on policies (`LigerFusedLinearGRPOLoss`) and on pairs.

Letters: T packed tokens | N documents | P pairs | V vocabulary.
"""

from __future__ import annotations

from workbench.systems.liger import metrics as named
from workbench.systems.liger.replay import case_settings, dpo_case, further_metrics, policy_loss_case
from workbench.systems.liger.settings import LigerSettings
from workbench.systems.liger.translate import CONTRACTS, back, counts, translate
from workbench.systems.registry import HEAD, System

SYSTEM = System(
    name="liger",
    title="Liger-Kernel",
    version="0.8.5",
    settings=LigerSettings,
    translate=translate,
    back=back,
    counts=counts,
    scaling=CONTRACTS,
    case_settings=case_settings,
    temperature=lambda settings: settings.temperature,
    metrics=further_metrics,
    replays={"fused_linear_policy_loss": policy_loss_case, "fused_linear_dpo": dpo_case},
    arrays=("old_logprobs", "ref_logprobs", "is_weights"),
    arrays_of={"fused_linear_dpo": HEAD},
    aliases=named.names,
)
