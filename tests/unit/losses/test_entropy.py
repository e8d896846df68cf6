import math

import pytest
import torch

from workbench.errors import SpecError
from workbench.losses.build import build_loss
from workbench.losses.entropy import entropy_bonus, highest_entropy, mean_squared_logit, restricted_to, squared_logit
from workbench.losses.terms import LossInputs, Term
from workbench.policy.logprobs.reference import token_logprobs, token_logprobs_from_logits
from workbench.specs.losses import LossSpec


def inputs_of(logits_TV, mask_T, temperature=1.0):
    """The head is the identity, so its hidden states are the logits."""
    size = logits_TV.shape[1]
    output = token_logprobs(
        logits_TV,
        torch.eye(size, dtype=logits_TV.dtype),
        torch.zeros(len(logits_TV), dtype=torch.int64),
        temperature=temperature,
    )
    zero = torch.zeros(len(logits_TV), dtype=logits_TV.dtype)
    return LossInputs(
        output.logprobs_T, zero, zero, entropy_T=output.entropy_T, logsumexp_T=output.logsumexp_T, loss_mask_T=mask_T
    )


MASK = torch.tensor([True, False, True])
LOGITS = torch.tensor([[0.3, -1.0, 2.0], [0.0, 0.0, 0.0], [-0.5, 0.7, 0.1]], dtype=torch.float64)


def test_the_bonus_is_minus_the_entropy_and_its_gradient_raises_it():
    logits = LOGITS.clone().requires_grad_()
    term = entropy_bonus(inputs_of(logits, MASK, temperature=0.7), 0.01)
    for t in (0, 2):
        weights = [math.exp(z / 0.7) for z in LOGITS[t].tolist()]
        shares = [w / sum(weights) for w in weights]
        assert term.values_T[t].item() == pytest.approx(-sum(p * math.log(p) for p in shares), rel=1e-13)
    assert term.coefficient == -0.01
    (term.coefficient * term.values_T).sum().backward()
    stepped = inputs_of(LOGITS - logits.grad, MASK, temperature=0.7).entropy_T
    assert (stepped > inputs_of(LOGITS, MASK, temperature=0.7).entropy_T)[MASK].all()
    assert logits.grad[1].tolist() == [0.0, 0.0, 0.0]


def test_the_penalty_is_the_squared_log_normaliser_with_twice_it_as_slope():
    normaliser = torch.tensor([1.5, -0.5, 3.0], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(3, dtype=torch.float64)
    term = squared_logit(LossInputs(zero, zero, zero, logsumexp_T=normaliser, loss_mask_T=MASK), 1e-3)
    assert (term.values_T.tolist(), term.coefficient) == ([2.25, 0.0, 9.0], 1e-3)
    term.values_T.sum().backward()
    assert normaliser.grad.tolist() == [3.0, 0.0, 6.0]


def test_a_constant_in_all_logits_is_seen_by_the_penalty_only():
    moved, still = inputs_of(LOGITS + 5.0, MASK), inputs_of(LOGITS, MASK)
    torch.testing.assert_close(moved.entropy_T, still.entropy_T, rtol=0, atol=1e-13)
    torch.testing.assert_close(moved.policy_logprobs_T, still.policy_logprobs_T, rtol=0, atol=1e-13)
    assert (squared_logit(moved, 1.0).values_T > squared_logit(still, 1.0).values_T)[MASK].all()


def test_rubbish_under_the_mask_reaches_no_gradient():
    rubbish = torch.tensor([1.0, math.nan, 2.0], requires_grad=True)
    zero = torch.zeros(3)
    inputs = LossInputs(zero, zero, zero, entropy_T=rubbish, logsumexp_T=rubbish, loss_mask_T=MASK)
    (entropy_bonus(inputs, 1.0).values_T + squared_logit(inputs, 1.0).values_T).sum().backward()
    assert rubbish.grad.tolist() == [3.0, 0.0, 5.0]


def test_a_missing_head_output_is_refused():
    zero = torch.zeros(2)
    with pytest.raises(SpecError, match="entropy bonus"):
        entropy_bonus(LossInputs(zero, zero, zero), 0.1)
    with pytest.raises(SpecError, match="squared-logit penalty"):
        squared_logit(LossInputs(zero, zero, zero), 0.1)


def test_a_bonus_for_chosen_tokens_is_their_mean_under_the_micro_batchs_own_weights():
    zero = torch.zeros(4, dtype=torch.float64)
    entropy_T = torch.tensor([1.0, 2.0, 5.0, math.nan], dtype=torch.float64, requires_grad=True)
    inputs = LossInputs(zero, zero, zero, entropy_T=entropy_T, loss_mask_T=torch.tensor([True, True, True, False]))
    chosen_T = torch.tensor([False, True, True, True])
    term = entropy_bonus(inputs, 0.1, denominator="local_token", chosen_T=chosen_T)
    assert term.weight == "local_token"
    mean = term.values_T.sum() / 3
    assert mean.item() == pytest.approx(3.5, rel=1e-15)  # of 2 and 5
    mean.backward()
    assert entropy_T.grad.tolist() == [0.0, 0.5, 0.5, 0.0]
    penalty = entropy_bonus(inputs, 0.1, chosen_T=chosen_T)
    assert (penalty.weight, penalty.values_T.tolist()) == ("penalty", [0.0, 2.0, 5.0, 0.0])


def test_a_bonus_for_no_token_is_0():
    zero = torch.zeros(2)
    term = entropy_bonus(
        LossInputs(zero, zero, zero, entropy_T=torch.ones(2)),
        0.1,
        denominator="local_token",
        chosen_T=torch.zeros(2, dtype=torch.bool),
    )
    assert term.values_T.tolist() == [0.0, 0.0]


def test_the_size_of_logits_is_the_mean_of_their_squares_and_its_slope_pulls_them_in():
    logits = LOGITS.clone().requires_grad_()
    output = token_logprobs_from_logits(
        logits, torch.zeros(3, dtype=torch.int64), temperature=0.5, outputs=("mean_squared_logit",)
    )
    zero = torch.zeros(3, dtype=torch.float64)
    term = mean_squared_logit(
        LossInputs(zero, zero, zero, mean_squared_logit_T=output.mean_squared_logit_T, loss_mask_T=MASK), 0.3
    )
    expected = [sum((z / 0.5) ** 2 for z in row) / 3 for row in LOGITS.tolist()]
    assert term.values_T.tolist() == pytest.approx([expected[0], 0.0, expected[2]], rel=1e-14)
    assert (term.coefficient, term.weight) == (0.3, "penalty")
    term.values_T.sum().backward()
    assert logits.grad[0].tolist() == pytest.approx([2 * z / 0.25 / 3 for z in LOGITS[0].tolist()], rel=1e-14)
    assert logits.grad[1].tolist() == [0.0, 0.0, 0.0]


def test_a_head_without_logit_sizes_is_refused():
    zero = torch.zeros(3)
    with pytest.raises(SpecError, match="no mean_squared_logit_T"):
        mean_squared_logit(LossInputs(zero, zero, zero), 0.1)


ENTROPY = [0.5, 2.0, math.nan, 1.0, 3.0, 1.5]
COUNTS = [True, True, False, True, True, True]


def of_entropies(entropy=ENTROPY, counts=COUNTS):
    size = len(counts)
    logprobs_T = torch.linspace(-2, -1, size, dtype=torch.float64)
    return LossInputs(
        logprobs_T.clone().requires_grad_(),
        logprobs_T,
        torch.ones(size, dtype=torch.float64),
        ref_logprobs_T=logprobs_T - 0.5,
        loss_mask_T=torch.tensor(counts),
        entropy_T=None if entropy is None else torch.tensor(entropy, dtype=torch.float64),
    )


@pytest.mark.parametrize(
    ("share", "chosen"),
    [
        (1.0, [0, 1, 3, 4, 5]),
        (0.75, [1, 3, 4, 5]),  # the 1.0 lies on the threshold, and is in
        (0.6, [1, 4, 5]),  # between 1.0 and 1.5
        (0.5, [1, 4, 5]),  # the median
        (0.3, [1, 4]),
        (0.0, [4]),
    ],
)
def test_the_share_of_highest_entropy(share, chosen):
    assert torch.nonzero(highest_entropy(of_entropies(), share)).squeeze(1).tolist() == chosen


def test_nothing_is_chosen_where_nothing_counts():
    assert highest_entropy(of_entropies(counts=[False] * 6), 0.5).tolist() == [False] * 6


def test_missing_entropies_are_refused():
    with pytest.raises(SpecError, match=r"the tokens of highest entropy \(share 0.5\)"):
        highest_entropy(of_entropies(entropy=None), 0.5)


def test_a_restricted_term_is_0_elsewhere_and_unchanged_inside():
    chosen_T = torch.tensor([True, False, True])
    zero = torch.zeros(3)
    term = Term(torch.tensor([1.0, math.nan, 3.0]), 0.5, weight="token", extras={"mine": zero})
    result = restricted_to(term, LossInputs(zero, zero, torch.tensor([1.0, 1.0, 0.0])), chosen_T)
    assert result.values_T.tolist() == [1.0, 0.0, 3.0]
    assert result.silent_T.tolist() == [False, True, True]  # the last has no advantage
    assert (result.coefficient, result.weight, set(result.extras)) == (0.5, "token", {"mine", "high_entropy"})


def test_policy_term_and_bonus_are_confined_and_penalties_are_not():
    spec = LossSpec(name="reinforce", top_entropy_share=0.3, entropy_coefficient=0.1, kl={"coefficient": 0.2})
    inputs = of_entropies()
    terms = build_loss(spec)(inputs)
    assert torch.nonzero(terms["policy"].values_T).squeeze(1).tolist() == [1, 4]
    assert torch.nonzero(terms["entropy"].values_T).squeeze(1).tolist() == [1, 4]
    assert torch.nonzero(terms["kl"].values_T).squeeze(1).tolist() == [0, 1, 3, 4, 5]
    terms["policy"].values_T.sum().backward()
    assert torch.nonzero(inputs.policy_logprobs_T.grad).squeeze(1).tolist() == [1, 4]


def test_a_share_of_the_local_tokens_is_declared():
    assert LossSpec(top_entropy_share=0.2).breaks == ("micro_batch", "packing", "dp", "cp")
    assert LossSpec(top_entropy_share=1.0).breaks == ()
    local = LossSpec(compat={"entropy_denominator": "local_token"})
    assert (local.breaks, local.model_copy(update={"entropy_coefficient": 0.1}).breaks) == (
        (),
        ("micro_batch", "packing", "dp"),
    )
