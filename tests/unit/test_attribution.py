"""Credit of tokens: the oracle's gradient, finite differences of the loss, and a reason for every 0."""

import math
from dataclasses import replace

import pytest
import torch

from tests.helpers.loss_batches import nasty_documents
from tests.oracles.surrogates import ORACLES
from tests.oracles.weights import gradient_weight
from workbench.attribution import FATES, token_credit
from workbench.errors import ShapeError, SpecError
from workbench.losses.corrections import CORRECTION_WEIGHTS
from workbench.rollouts.batch import Extension, RolloutBatch
from workbench.specs.losses import LossSpec

MASKS = {
    "answer": [0, 0, 1, 1, 1],
    "empty": [0, 0, 0],
    "turns": [0, 1, 1, 0, 0, 1, 0, 1],
    "one": [0, 1],
    "lone": [0],
    "long": [0, 0, *[1] * 12],
}


def step(seed, **how):
    """(documents, batch, log-probabilities of the policy) with ratios to old, sampler and ref in low to high."""
    documents = nasty_documents(seed, masks=MASKS, **({"low": 0.6, "high": 1.7, "rubbish": False} | how))
    batch = RolloutBatch.from_documents(
        [
            {
                "tokens": list(range(len(d["mask"]))),
                "loss_mask": d["mask"],
                "advantages": tensor(d["advantages"]),
                "old_logprobs": tensor(d["old"]),
                "sampler_logprobs": tensor(d["sampler"]),
                "ref_logprobs": tensor(d["ref"]),
                "reward": tensor(d["reward"]),
                "group_id": d["group"],
            }
            for d in documents
        ]
    )
    return documents, batch, torch.cat([tensor(d["policy"]) for d in documents])


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("denominator", ["token", "document", "raw"])
@pytest.mark.parametrize(
    "name",
    [
        "grpo",
        "dual_clip",
        "importance_sampling",
        "cispo",
        "sapo",
        "dro",
        "gspo",
        "gmpo",
        "luspo",
        "vespo",
        "dppo_tv",
        "sft",
    ],
)
def test_credit_is_the_oracles_gradient_with_the_oracles_weights(name, denominator):
    documents, batch, policy_T = step(3, low=1e-3, high=1e3, rubbish=True)
    spec = LossSpec(
        name=name, denominator=denominator, compat={"gradient_divisor": 4.0, "normalize_by_documents": True}
    )
    shaped = [{"tokens": d["mask"], "loss_mask": d["mask"]} for d in documents]
    weights = [
        [gradient_weight(shaped, number, denominator, gradient_divisor=4.0, normalize_by_documents=True)]
        * len(d["mask"])
        for number, d in enumerate(documents)
    ]
    credit = token_credit(batch, spec, policy_T)
    _, gradient = ORACLES[spec.surrogate.kind]
    text = {key: value for key, value in spec.surrogate.parameters.items() if value != "token"}  # the default
    parameters = {key: value for key, value in text.items() if value is not None or not key.startswith("log_")}
    expected_T = torch.cat([tensor(one) for one in gradient(documents, weights, **parameters)])
    assert expected_T.abs().max() > 0
    torch.testing.assert_close(credit.credit_T, expected_T, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(
        credit.weights_T,
        torch.where(batch.loss_mask_T, torch.cat([tensor(one) for one in weights]), 0.0),
        rtol=1e-14,
        atol=0.0,
    )


WHOLE = {"kl": {"coefficient": 0.3}, "positive_nll_coefficient": 0.2}


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "grpo", "denominator": "prompt_group"},
        {"name": "gspo", "denominator": "document_sum"},
        {"name": "gmpo"},
        {"name": "grpo", "correction": {"kind": "tis", "ratio_high": 1.1}},
        {"name": "grpo", "correction": {"kind": "icepop", "ratio_low": 0.8, "denominator": "survivors"}},
        {"name": "importance_sampling", "correction": {"kind": "batch_normalized"}},
    ],
    ids=["grpo", "gspo", "gmpo", "tis", "survivors", "normalized"],
)
def test_credit_is_the_slope_of_the_loss(settings):
    _, batch, policy_T = step(5)
    spec = LossSpec(**settings, **WHOLE)
    credit = token_credit(batch, spec, policy_T)
    assert credit.credit_T[credit.trained_T].abs().min() > 0, "KL reaches every token"
    for at in range(batch.num_tokens):
        up, down = (
            token_credit(batch, spec, policy_T.index_add(0, torch.tensor([at]), tensor([h]))).loss
            for h in (1e-5, -1e-5)
        )
        assert (up - down) / 2e-5 == pytest.approx(float(credit.credit_T[at]), rel=1e-6, abs=1e-9), at


def test_the_policy_term_has_its_own_part():
    _, batch, policy_T = step(5)
    alone = token_credit(batch, LossSpec(name="grpo"), policy_T)
    with_kl = token_credit(batch, LossSpec(name="grpo", **WHOLE), policy_T)
    assert torch.equal(alone.credit_T, alone.policy_T)
    torch.testing.assert_close(with_kl.policy_T, alone.credit_T)
    assert (with_kl.credit_T != with_kl.policy_T).any()


def test_without_a_policy_it_is_the_first_step():
    _, batch, _ = step(5)
    credit = token_credit(batch, LossSpec(name="grpo"))
    expected_T = torch.where(batch.loss_mask_T, -batch.advantages_T / batch.num_trained_tokens, 0.0)
    torch.testing.assert_close(credit.credit_T, expected_T)
    assert credit.loss == pytest.approx(float(expected_T.sum()), rel=1e-12)


def five_tokens(**columns):
    old = [0.0, -1.0, -1.0, -1.0, -1.0]
    document = {"tokens": range(5), "loss_mask": [0, 1, 1, 1, 1], "advantages": [0, 1, 1, 0, -1], "old_logprobs": old}
    return RolloutBatch.from_documents([document | {"sampler_logprobs": old} | columns])


def test_every_token_has_one_fate_and_the_shares_add_up():
    batch = five_tokens(sampler_logprobs=[0.0, -1.0, -1.0, -1.0, -9.0])
    spec = LossSpec(name="grpo", correction={"kind": "icepop"})
    credit = token_credit(batch, spec, torch.tensor([0.0, -1.0, -0.2, -1.0, -1.0]))
    fates = [FATES[number] for number in credit.fates_T]
    assert fates == ["untrained", "acts", "clipped", "zero advantage", "rejected"]
    assert credit.shares() == {
        "acts": 0.25,
        "clipped": 0.25,
        "rejected": 0.25,
        "zero advantage": 0.25,
        "no gradient": 0.0,
    }
    assert (credit.credit_T != 0).tolist() == [False, True, False, False, False]


def test_a_token_that_is_clipped_and_rejected_is_rejected():
    batch = five_tokens(sampler_logprobs=[0.0, -1.0, -9.0, -1.0, -1.0])
    credit = token_credit(batch, LossSpec(correction={"kind": "icepop"}), torch.tensor([0.0, -1.0, -0.2, -1.0, -1.0]))
    assert FATES[int(credit.fates_T[2])] == "rejected"


def test_shares_by_weight_count_tokens_as_the_denominator_does():
    short = {"tokens": [1, 2], "loss_mask": [0, 1], "advantages": 0.0, "old_logprobs": [0, -1.0]}
    long = {"tokens": [1, 2, 3, 4], "loss_mask": [0, 1, 1, 1], "advantages": 1.0, "old_logprobs": [0, -1.0, -1.0, -1.0]}
    credit = token_credit(RolloutBatch.from_documents([short, long]), LossSpec(denominator="document"))
    assert credit.shares()["zero advantage"] == 0.25
    assert credit.shares(by="weight")["zero advantage"] == pytest.approx(0.5, rel=1e-12)


def test_a_loss_without_advantages_acts_where_they_are_0():
    credit = token_credit(five_tokens(advantages=0.0), LossSpec(name="sft"))
    assert credit.shares()["acts"] == 1.0


def test_an_unexplained_zero_gradient_is_labelled():
    credit = token_credit(five_tokens(), LossSpec(name="grpo", surrogate={"coefficient": 0.0}))
    assert {fate: part for fate, part in credit.shares().items() if part} == {
        "zero advantage": 0.25,
        "no gradient": 0.75,
    }


def test_a_clipped_token_may_still_have_the_credit_of_another_term():
    batch = five_tokens(ref_logprobs=[0.0, -2.0, -2.0, -2.0, -2.0])
    credit = token_credit(batch, LossSpec(name="grpo", kl={"coefficient": 0.1}), torch.tensor([0, -1, -0.2, -1.0, -1]))
    assert FATES[int(credit.fates_T[2])] == "clipped"
    assert credit.policy_T[2] == 0
    assert credit.credit_T[2] != 0


def test_extras_are_aligned_with_tokens():
    batch = five_tokens(sampler_logprobs=[0.0, -2.0, -1.0, -1.0, -1.5])
    credit = token_credit(batch, LossSpec(name="grpo", correction={"kind": "tis"}))
    raw_T, applied_T = (credit.extras_T[name][batch.loss_mask_T] for name in ("raw_weight", "applied_weight"))
    assert raw_T.tolist() == pytest.approx([math.e, 1.0, 1.0, math.exp(0.5)])
    assert applied_T.tolist() == pytest.approx([2.0, 1.0, 1.0, math.exp(0.5)])


def test_terms_that_need_logits_are_left_out():
    _, batch, policy_T = step(5)
    plain, more = (
        token_credit(batch, LossSpec(**settings), policy_T)
        for settings in (
            {},
            {"entropy_coefficient": 0.1, "squared_logit_coefficient": 0.1, "mean_squared_logit_coefficient": 0.1},
        )
    )
    assert torch.equal(plain.credit_T, more.credit_T)


def test_nothing_that_counts_gives_no_credit_and_no_shares():
    batch = five_tokens(loss_mask=[0] * 5)
    credit = token_credit(batch, LossSpec())
    assert not credit.credit_T.any()
    assert set(credit.shares().values()) == {0.0}


def test_documents_in_another_order_have_the_same_credit():
    _, batch, policy_T = step(9)
    order = [4, 2, 0, 5, 1, 3]
    turned = batch.select(order)
    spec = LossSpec(name="gspo", kl={"coefficient": 0.1})
    before, after = token_credit(batch, spec, policy_T), token_credit(turned, spec, policy_T[turned.source_T])
    torch.testing.assert_close(after.credit_T, before.credit_T[turned.source_T], rtol=1e-12, atol=1e-15)


def test_log_probabilities_of_another_batch_are_refused():
    with pytest.raises(ShapeError, match="one for each of the 5 tokens"):
        token_credit(five_tokens(), LossSpec(), torch.zeros(4))


def test_missing_fields_of_the_batch_are_named():
    with pytest.raises(SpecError, match="no ref_logprobs"):
        token_credit(replace(five_tokens(), ref_logprobs_T=None), LossSpec(kl={"coefficient": 0.1}))


def test_weights_of_a_correction_that_came_with_the_batch_multiply_the_credit():
    """The oracle's gradient, times the weight that each token was given."""
    documents, batch, policy_T = step(3, low=1e-3, high=1e3, rubbish=True)
    weights_T = 0.25 + torch.arange(batch.num_tokens, dtype=torch.float64) % 5 / 2
    weighed = replace(batch, extensions={CORRECTION_WEIGHTS: Extension(weights_T, "token", "1", "of another program")})
    spec = LossSpec(name="grpo", denominator="token", correction={"ratio": "given"})
    shaped = [{"tokens": d["mask"], "loss_mask": d["mask"]} for d in documents]
    token_weights = [[gradient_weight(shaped, number, "token")] * len(d["mask"]) for number, d in enumerate(documents)]
    _, gradient = ORACLES[spec.surrogate.kind]
    parameters = {key: value for key, value in spec.surrogate.parameters.items() if value not in ("token", None)}
    plain_T = torch.cat([tensor(one) for one in gradient(documents, token_weights, **parameters)])
    credit = token_credit(weighed, spec, policy_T)
    assert plain_T.abs().max() > 0
    torch.testing.assert_close(credit.credit_T, plain_T * weights_T, rtol=1e-10, atol=1e-14)
    with pytest.raises(SpecError, match="no correction_weights in the batch"):
        token_credit(batch, spec, policy_T)
