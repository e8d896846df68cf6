"""AReaL: decoupled PPO, GSPO, SAPO and CISPO, and rejection of tokens that the sampler rates differently.

Its "proximal" log-probabilities are the old policy's here, its "old" or "behave" ones the sampler's.

Letters: T packed tokens.
"""

from __future__ import annotations

from workbench.systems.areal import metrics as named
from workbench.systems.areal.replay import case_settings, critic, normalization, outputs
from workbench.systems.areal.settings import ArealSettings
from workbench.systems.areal.translate import CONTRACTS, back, translate
from workbench.systems.registry import LOGPROBS, VALUES, System

SYSTEM = System(
    name="areal",
    title="AReaL",
    version="cbff54d6",
    settings=ArealSettings,
    translate=translate,
    back=back,
    scaling=CONTRACTS,
    case_settings=case_settings,
    outputs=outputs,
    replays={"value_loss": critic, "normalization": normalization},
    arrays=LOGPROBS,
    arrays_of={"value_loss": VALUES, "normalization": ("values", "mask")},
    aliases=named.names,
)
