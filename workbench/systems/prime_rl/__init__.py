"""PrimeIntellect-ai/prime-rl: three components of a loss, each on tokens and with a count of its own.

The component `rl` is the configured loss; `ce` imitates tokens, and `ref_kl` distils a reference. Each acts on tokens
with a weight other than 0, is weighted by it and divided by its number of tokens in the whole batch.

Letters: T packed tokens.
"""

from __future__ import annotations

from workbench.systems.prime_rl import metrics as named
from workbench.systems.prime_rl.replay import policy_loss
from workbench.systems.prime_rl.settings import PrimeSettings
from workbench.systems.prime_rl.translate import CONTRACTS, back, counts, translate
from workbench.systems.registry import System

SYSTEM = System(
    name="prime_rl",
    title="prime-rl",
    version="559b4477 (2026-08-21)",
    settings=PrimeSettings,
    translate=translate,
    back=back,
    counts=counts,
    scaling=CONTRACTS,
    replays={"policy_loss_packed": policy_loss},
    arrays=("rollout_logprobs", "ref_logprobs", "rl_weights", "ce_weights", "ref_kl_weights"),
    unsupported_arrays={"old_logprobs": "prime-rl takes its ratio against the sampler; give rollout_logprobs"},
    aliases=named.names,
)
