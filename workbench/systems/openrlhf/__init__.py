"""OpenRLHF/OpenRLHF: clipped policy losses, a critic's loss, DPO, KL estimates and rewards of tokens.

Letters: T packed tokens | P pairs.
"""

from __future__ import annotations

from workbench.systems.contracts import CONTRACTS
from workbench.systems.openrlhf.replay import dpo, kl_spec, reward, undefined_loss, value
from workbench.systems.openrlhf.settings import PolicySettings
from workbench.systems.openrlhf.translate import back, counts, translate
from workbench.systems.registry import System
from workbench.systems.replays import kl_estimator

SYSTEM = System(
    name="openrlhf",
    title="OpenRLHF",
    version="3c3be623 (2026-08-13)",
    settings=PolicySettings,
    translate=translate,
    back=back,
    counts=counts,
    scaling=CONTRACTS["openrlhf"],
    outputs=undefined_loss,
    replays={
        "value_loss": value,
        "dpo_from_sums": dpo,
        "kl_estimator": kl_estimator(kl_spec),
        "reward_shaping": reward,
    },
)
