"""Surrogates: one pure function per kind, from LossInputs and keyword parameters to the policy Term.

Each has its settings under the same name in `workbench.specs.losses`, and its keyword parameters are those settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from workbench.losses.clipped import clipped_surrogate
from workbench.losses.covariance import clip_cov, kl_cov
from workbench.losses.direct import cispo, gpg, importance_sampling, on_policy, reinforce
from workbench.losses.preference import dpo
from workbench.losses.sequence import gmpo, gspo, gspo_token, luspo, vespo
from workbench.losses.soft import dro, sapo
from workbench.losses.supervised import sft
from workbench.losses.terms import Term
from workbench.losses.trust_region import dppo_kl, dppo_tv, ipo, ref_kl

SURROGATES: Mapping[str, Callable[..., Term]] = {
    "ppo": clipped_surrogate,
    "importance_sampling": importance_sampling,
    "reinforce": reinforce,
    "on_policy": on_policy,
    "cispo": cispo,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "luspo": luspo,
    "gmpo": gmpo,
    "sapo": sapo,
    "vespo": vespo,
    "gpg": gpg,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "ipo": ipo,
    "ref_kl": ref_kl,
    "dro": dro,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "sft": sft,
    "dpo": dpo,
}
"""Kind -> its function."""
