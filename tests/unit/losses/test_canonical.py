"""Specs with one canonical form are one loss: each rule holds numerically, and its near misses do not."""

import pytest

from workbench.losses.canonical import canonical, canonical_gradient
from workbench.specs.losses import PRESETS, LossSpec
from workbench.systems.counterexample import outcome, relative_distance

SEEDS = range(6)
PPO = {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.28}
GSPO = {"kind": "gspo", "clip_low": 0.1, "clip_high": 0.2}
LUSPO = {"kind": "luspo", "clip_low": 0.1, "clip_high": 0.2}
K3 = {"coefficient": 0.3, "estimator": "k3"}
BY_DOCUMENT = {"importance": "old", "importance_level": "document"}
KEPT = {"kind": "icepop", "ratio_high": 1.2, "surrogate_over": "kept"}


def loss(surrogate=PPO, **settings):
    return LossSpec(name="grpo", surrogate=surrogate, **settings)


SAME = {
    "names": (loss(), LossSpec(name="dapo")),
    "local count of one micro-batch": (loss(denominator="local_token"), loss(denominator="token")),
    "contract": (loss(compat={"scaling": {"counts": "micro_batch", "engine_divides": ["dp"]}}), loss()),
    "epsilon": (loss(compat={"scaling": {"count_epsilon": 1e-8, "mean_epsilon": 1e-8}}), loss()),
    "penalty of weight 0": (loss(kl={"coefficient": 0.0, "estimator": "k1"}), loss()),
    "penalty in the reward": (loss(kl=K3 | {"placement": "reward"}), loss()),
    "documents that divide nothing": (loss(compat={"documents_counted": "all"}), loss()),
    "constant 1": (loss(denominator="constant", denominator_constant=1.0), loss(denominator="document_sum")),
    "correction that does nothing": (loss(correction={"kind": "none", "denominator": "original"}), loss()),
    "weight bounded by 0 below": (loss(correction={"kind": "tis", "ratio_low": 0.0}), loss(correction={"kind": "tis"})),
    "population": (
        loss(correction={"kind": "batch_normalized", "population": "micro_batch"}),
        loss(correction={"kind": "batch_normalized"}),
    ),
    "squared is twice k2": (
        loss(kl={"coefficient": 0.1, "estimator": "squared"}),
        loss(kl={"coefficient": 0.2, "estimator": "k2"}),
    ),
    "k3 with the score's gradient": (
        loss(kl=K3 | {"gradient": "score"}),
        loss(kl=K3 | {"gradient": "straight_through"}),
    ),
    "straight-through k2": (
        loss(kl=K3 | {"estimator": "k2", "gradient": "straight_through"}),
        loss(kl=K3 | {"estimator": "k2"}),
    ),
    "weight of the current policy": (
        loss(old_policy="current", kl=K3 | {"importance": "old"}),
        loss(old_policy="current", kl=K3),
    ),
    "gpg": (LossSpec(name="gpg"), LossSpec(name="reinforce")),
    "bounds of cispo": (
        loss({"kind": "cispo", "clip_low": 0.2, "clip_high": 0.5}),
        loss({"kind": "cispo", "bounds": "absolute", "clip_low": 0.8, "clip_high": 1.5}),
    ),
    "a bound below 0": (loss(PPO | {"clip_low": 1.0}), loss(PPO | {"clip_low": 1.7})),
    "delta is a dual clip": (loss(PPO | {"delta": 3.0}), loss(PPO | {"dual_clip": 3.0})),
    "delta inside the clip": (loss(PPO | {"delta": 1.1}), loss(PPO | {"clip_high": 0.1, "dual_clip": 1.28})),
    "ppo on the current policy": (loss(old_policy="current"), LossSpec(name="on_policy")),
    "cispo on the current policy": (
        loss({"kind": "cispo", "clip_low": 0.2, "clip_high": 0.5}, old_policy="current"),
        LossSpec(name="reinforce"),
    ),
    "a loss that asks no old policy": (loss({"kind": "reinforce"}, old_policy="current"), loss({"kind": "reinforce"})),
    "luspo": (loss(LUSPO, denominator="document"), loss(GSPO, denominator="document_sum")),
    "luspo of undecided tokens": (
        loss(LUSPO, denominator="document", top_entropy_share=0.5),
        loss(GSPO, denominator="document_sum", top_entropy_share=0.5),
    ),
    "data of a document's weight of the current policy": (
        loss(old_policy="current", kl=K3 | BY_DOCUMENT),
        loss(old_policy="current", kl=K3),
    ),
    "bonus per token": (
        loss(entropy_coefficient=0.1, compat={"entropy_denominator": "local_token"}),
        loss(entropy_coefficient=0.1),
    ),
}
FAR = {
    "clamp of the log ratio": (loss(PPO | {"log_clamp": 20.0}), loss()),
    "dual clip": (loss(PPO | {"dual_clip": 1e9}), loss()),
    "clamp of the KL's argument": (loss(kl=K3 | {"input_clamp": 20.0}), loss(kl=K3)),
    "clamp of a weight without a bound": (
        loss(correction={"kind": "importance_sampling", "log_clamp": 20.0}),
        loss(correction={"kind": "importance_sampling"}),
    ),
    "clamp of a weight": (loss(correction={"kind": "tis", "log_clamp": 20.0}), loss(correction={"kind": "tis"})),
}
DIFFERENT = {
    "bound": (loss(), loss(PPO | {"clip_high": 0.2})),
    "large epsilon": (loss(compat={"scaling": {"count_epsilon": 0.5}}), loss()),
    "empty documents as tokens": (loss(compat={"scaling": {"least_tokens": 1}}), loss()),
    "documents that divide once more": (
        loss(compat={"documents_counted": "all", "normalize_by_documents": True}),
        loss(compat={"normalize_by_documents": True}),
    ),
    "documents that divide": (
        loss(denominator="document", compat={"documents_counted": "all"}),
        loss(denominator="document"),
    ),
    "constant 2": (loss(denominator="constant", denominator_constant=2.0), loss(denominator="document_sum")),
    "weight bounded below": (loss(correction={"kind": "tis", "ratio_low": 0.9}), loss(correction={"kind": "tis"})),
    "squared with a clamp": (
        loss(kl={"coefficient": 0.1, "estimator": "squared", "output_clamp": 0.5}),
        loss(kl={"coefficient": 0.2, "estimator": "k2", "output_clamp": 0.5}),
    ),
    "k3 score with a clamp": (
        loss(kl=K3 | {"gradient": "score", "output_clamp": 0.5}),
        loss(kl=K3 | {"gradient": "straight_through", "output_clamp": 0.5}),
    ),
    "squared straight through": (
        loss(kl={"coefficient": 0.1, "estimator": "squared", "gradient": "straight_through"}),
        loss(kl={"coefficient": 0.2, "estimator": "k2"}),
    ),
    "k3 score with a document's weight": (
        loss(kl=K3 | BY_DOCUMENT | {"gradient": "score"}),
        loss(kl=K3 | BY_DOCUMENT | {"gradient": "straight_through"}),
    ),
    "a document's weight of the current policy": (
        loss(old_policy="current", kl=K3 | BY_DOCUMENT | {"gradient": "score"}),
        loss(old_policy="current", kl=K3 | {"gradient": "score"}),
    ),
    "k1 score": (
        loss(kl=K3 | {"estimator": "k1", "gradient": "score"}),
        loss(kl=K3 | {"estimator": "k1", "gradient": "straight_through"}),
    ),
    "weight of the recorded policy": (loss(kl=K3 | {"importance": "old"}), loss(kl=K3)),
    "cispo bounds are no lengths": (
        loss({"kind": "cispo", "clip_low": 0.2, "clip_high": 2.0}),
        loss({"kind": "cispo", "bounds": "absolute", "clip_low": 0.2, "clip_high": 2.0}),
    ),
    "dual clip": (loss(PPO | {"dual_clip": 3.0}), loss()),
    "clamp that binds": (loss(PPO | {"log_clamp": 0.1}), loss()),
    "gspo on the current policy": (loss(GSPO, old_policy="current"), LossSpec(name="on_policy")),
    "ppo on the recorded policy": (loss(), LossSpec(name="on_policy")),
    "ppo with a delta below 1 on the current policy": (
        loss(PPO | {"delta": 0.5}, old_policy="current"),
        LossSpec(name="on_policy"),
    ),
    "an old policy in the correction": (
        loss({"kind": "reinforce"}, old_policy="current", correction={"kind": "importance_sampling"}),
        loss({"kind": "reinforce"}, correction={"kind": "importance_sampling"}),
    ),
    "cispo of absolute bounds above 1": (
        loss({"kind": "cispo", "bounds": "absolute", "clip_low": 1.5, "clip_high": 2.0}, old_policy="current"),
        LossSpec(name="reinforce"),
    ),
    "cispo of absolute bounds beside 1": (
        loss({"kind": "cispo", "bounds": "absolute", "clip_high": 0.5}, old_policy="current"),
        LossSpec(name="reinforce"),
    ),
    "an old policy in the penalty": (
        loss({"kind": "reinforce"}, old_policy="current", kl=K3 | {"against": "old"}),
        loss({"kind": "reinforce"}, kl=K3 | {"against": "old"}),
    ),
    "luspo with a penalty": (loss(LUSPO, denominator="document", kl=K3), loss(GSPO, denominator="document_sum", kl=K3)),
    "luspo over kept tokens": (
        loss(LUSPO, denominator="document", correction=KEPT),
        loss(GSPO, denominator="document_sum", correction=KEPT),
    ),
    "luspo with an epsilon beside L": (
        loss(LUSPO, denominator="document", compat={"scaling": {"length_epsilon": 0.5}}),
        loss(GSPO, denominator="document_sum", compat={"scaling": {"length_epsilon": 0.5}}),
    ),
    "luspo per token": (loss(LUSPO), loss(GSPO)),
    "advantage of the document": (loss(GSPO | {"advantage_level": "document"}), loss(GSPO)),
    "bonus of undecided tokens": (
        loss(entropy_coefficient=0.1, compat={"entropy_denominator": "local_token"}, top_entropy_share=0.5),
        loss(entropy_coefficient=0.1, top_entropy_share=0.5),
    ),
    "bonus per document": (
        loss(entropy_coefficient=0.1, denominator="document", compat={"entropy_denominator": "local_token"}),
        loss(entropy_coefficient=0.1, denominator="document"),
    ),
}


def distance(one, other):
    return max(max(relative_distance(outcome(one, seed), outcome(other, seed))) for seed in SEEDS)


@pytest.mark.parametrize("name", SAME | FAR)
def test_one_form_is_one_loss(name):
    one, other = (SAME | FAR)[name]
    assert canonical(one) == canonical(other)
    assert distance(one, other) < 1e-7


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_near_miss_is_another_form_and_another_loss(name):
    one, other = DIFFERENT[name]
    assert canonical(one) != canonical(other)
    assert distance(one, other) > 1e-4


def test_a_clamp_that_is_far_for_a_token_is_near_for_the_sum_of_a_document():
    by_document = {"kind": "importance_sampling", "ratio": "document_sum"}
    clamped = canonical(loss(correction=by_document | {"log_clamp": 20.0}))
    assert clamped != canonical(loss(correction=by_document))
    bounded = by_document | {"ratio_high": 2.0}
    assert canonical(loss(correction=bounded | {"log_clamp": 20.0})) == canonical(loss(correction=bounded))


def test_on_policy_and_reinforce_share_the_gradient_only():
    one, other = LossSpec(name="on_policy"), LossSpec(name="reinforce")
    assert canonical(one) != canonical(other)
    assert canonical_gradient(one) == canonical_gradient(other)
    results = [relative_distance(outcome(one, seed), outcome(other, seed)) for seed in SEEDS]
    assert max(gradient for _, gradient in results) < 1e-12
    assert max(number for number, _ in results) > 0.1


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_has_a_form_of_plain_values(name):
    constant = {"denominator_constant": 8.0} if name == "dr_grpo" else {}
    form = canonical(LossSpec(name=name, **constant))
    assert form["surrogate.kind"]
    assert not [value for value in form.values() if isinstance(value, dict) or value is None]
