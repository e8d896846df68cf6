"""Named losses of the field with their defaults, as data.

A preset has only the differences from the defaults of `workbench.specs.losses`; for a kind of surrogate with
defaults of its own it has the kind alone. Sources are in `workbench/losses/README.md`.
"""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    # token-level clipping
    "grpo": {"surrogate": {"kind": "ppo"}},  # the paper's weights: denominator "document"
    "ppo": {"surrogate": {"kind": "ppo"}},
    "dual_clip": {"surrogate": {"kind": "ppo", "dual_clip": 3.0}},
    "two_sided": {"surrogate": {"kind": "ppo", "delta": 4.0}},
    "dapo": {"surrogate": {"kind": "ppo", "clip_high": 0.28}},
    "dr_grpo": {"surrogate": {"kind": "ppo"}, "denominator": "constant"},
    "bnpo": {"surrogate": {"kind": "ppo"}, "denominator": "local_token"},
    "vapo": {"surrogate": {"kind": "ppo", "clip_high": 0.28}, "positive_nll_coefficient": 0.1},
    # no clipping of the gradient
    "reinforce": {"surrogate": {"kind": "reinforce"}},
    "on_policy": {"surrogate": {"kind": "on_policy"}},
    "importance_sampling": {"surrogate": {"kind": "importance_sampling"}},
    "gpg": {"surrogate": {"kind": "gpg"}},
    "cispo": {"surrogate": {"kind": "cispo"}},
    "cispo_absolute": {"surrogate": {"kind": "cispo", "bounds": "absolute", "clip_high": 5.0}},
    "truncated_reinforce": {"surrogate": {"kind": "cispo", "clip_high": 0.2}},
    "dro": {"surrogate": {"kind": "dro"}},
    "sapo": {"surrogate": {"kind": "sapo"}, "denominator": "document"},
    # one ratio per document
    "gspo": {"surrogate": {"kind": "gspo"}, "denominator": "document"},
    "gspo_token": {"surrogate": {"kind": "gspo_token"}, "denominator": "document"},
    "luspo": {"surrogate": {"kind": "luspo"}, "denominator": "document"},
    "gmpo": {"surrogate": {"kind": "gmpo"}, "denominator": "document"},
    "vespo": {"surrogate": {"kind": "vespo"}},
    # trust regions in probability
    "dppo_tv": {"surrogate": {"kind": "dppo_tv"}},
    "dppo_kl": {"surrogate": {"kind": "dppo_kl"}},
    "ipo": {"surrogate": {"kind": "ipo"}, "kl": {"estimator": "squared", "against": "sampler", "coefficient": 1e-3}},
    "prime_rl": {
        "surrogate": {"kind": "dppo_tv", "threshold_low": 0.2, "threshold_high": 0.2},
        "kl": {"estimator": "squared", "against": "sampler", "coefficient": 1e-3},
    },
    "ref_kl": {
        "surrogate": {"kind": "ref_kl"},
        "kl": {"estimator": "squared", "against": "sampler", "coefficient": 1e-3},
    },
    # selections by covariance
    "clip_cov": {"surrogate": {"kind": "clip_cov"}},
    "kl_cov": {"surrogate": {"kind": "kl_cov"}},
    # without rewards
    "sft": {"surrogate": {"kind": "sft"}},
    "dpo": {"surrogate": {"kind": "dpo"}, "denominator": "document"},
}
"""Name -> its settings."""
