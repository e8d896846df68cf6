"""OpenRLHF/OpenRLHF: clipped policy losses, a critic's loss, DPO, KL estimates and rewards of tokens.

Letters: T packed tokens | P pairs.
"""

from __future__ import annotations

from workbench.systems.openrlhf import metrics as named
from workbench.systems.openrlhf.replay import dpo, kl_spec, reward, undefined_loss, value
from workbench.systems.openrlhf.settings import PolicySettings
from workbench.systems.openrlhf.translate import CONTRACTS, back, counts, translate
from workbench.systems.registry import ESTIMATOR, VALUES, System
from workbench.systems.replays import kl_estimator

SYSTEM = System(
    name="openrlhf",
    title="OpenRLHF",
    version="3c3be623 (2026-08-13)",
    settings=PolicySettings,
    translate=translate,
    back=back,
    counts=counts,
    scaling=CONTRACTS,
    outputs=undefined_loss,
    replays={
        "value_loss": value,
        "dpo_from_sums": dpo,
        "kl_estimator": kl_estimator(kl_spec),
        "reward_shaping": reward,
    },
    arrays=("old_logprobs", "rollout_logprobs"),
    arrays_of={
        "value_loss": VALUES,
        "dpo_from_sums": (
            "chosen_logprob_sums",
            "rejected_logprob_sums",
            "ref_chosen_logprob_sums",
            "ref_rejected_logprob_sums",
        ),
        "kl_estimator": ESTIMATOR,
        "reward_shaping": ("rewards", "kl", "mask"),
    },
    unsupported_arrays={
        "ref_logprobs": "OpenRLHF's PolicyLoss has no KL term; replay the KL as the kind kl_estimator",
        "entropies": "OpenRLHF's PolicyLoss has no entropy bonus",
    },
    aliases=named.names,
)
