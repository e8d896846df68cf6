"""radixark/miles: slime's losses, with bounds of log ratios; its dumps, one file a rank."""

from __future__ import annotations

from workbench.systems.miles.dump import read_dump
from workbench.systems.miles.metrics import LEFT_OUT, names
from workbench.systems.miles.settings import MilesSettings
from workbench.systems.miles.translate import back, translate
from workbench.systems.registry import LOGPROBS, System
from workbench.systems.slime import case_settings, further_metrics, peer_settings, policy_loss
from workbench.systems.slime.advantages import estimator_of
from workbench.systems.slime.translate import CONTRACTS, micro_batch_sums

SYSTEM = System(
    name="miles",
    title="miles",
    version="31f1ca96",
    settings=MilesSettings,
    translate=translate,
    back=back,
    counts=micro_batch_sums,
    case_settings=case_settings,
    peer_settings=peer_settings,
    metrics=further_metrics,
    scaling=CONTRACTS,
    replays={"policy_loss": policy_loss, "policy_loss_packed": policy_loss},
    arrays=(*LOGPROBS, "entropies", "sample_denominators"),
    aliases=names,
    left_out=LEFT_OUT,
    estimator=estimator_of,
    read_dump=read_dump,
)
