"""linkedin/Liger-Kernel: losses fused with the output head, on policies (`LigerFusedLinearGRPOLoss`) and on pairs.

Letters: T packed tokens | N documents | P pairs | V vocabulary.
"""

from __future__ import annotations

from workbench.systems.contracts import CONTRACTS
from workbench.systems.liger.replay import case_settings, dpo_case, metrics, policy_loss_case
from workbench.systems.liger.settings import LigerSettings
from workbench.systems.liger.translate import back, counts, translate
from workbench.systems.registry import System

SYSTEM = System(
    name="liger",
    title="Liger-Kernel",
    version="0.8.5",
    settings=LigerSettings,
    translate=translate,
    back=back,
    counts=counts,
    scaling=CONTRACTS["liger"],
    case_settings=case_settings,
    temperature=lambda settings: settings.temperature,
    metrics=metrics,
    replays={"fused_linear_policy_loss": policy_loss_case, "fused_linear_dpo": dpo_case},
)
