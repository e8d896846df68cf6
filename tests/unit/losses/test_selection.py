"""Terms that act on the tokens of highest entropy alone."""

import math

import pytest
import torch

from workbench.errors import SpecError
from workbench.losses.build import make_loss
from workbench.losses.selection import highest_entropy, restricted_to
from workbench.losses.terms import LossInputs, Term
from workbench.specs.losses import LossSpec

ENTROPY = [0.5, 2.0, math.nan, 1.0, 3.0, 1.5]
COUNTS = [True, True, False, True, True, True]


def inputs_of(entropy=ENTROPY, counts=COUNTS):
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
    assert torch.nonzero(highest_entropy(inputs_of(), share)).squeeze(1).tolist() == chosen


def test_nothing_is_chosen_where_nothing_counts():
    assert highest_entropy(inputs_of(counts=[False] * 6), 0.5).tolist() == [False] * 6


def test_without_entropies_it_is_refused_in_words():
    with pytest.raises(SpecError, match=r"the tokens of highest entropy \(share 0.5\)"):
        highest_entropy(inputs_of(entropy=None), 0.5)


def test_a_confined_term_is_silent_elsewhere_and_keeps_what_it_was():
    chosen_T = torch.tensor([True, False, True])
    zero = torch.zeros(3)
    term = Term(torch.tensor([1.0, math.nan, 3.0]), 0.5, weight="token", extras={"mine": zero})
    found = restricted_to(term, LossInputs(zero, zero, torch.tensor([1.0, 1.0, 0.0])), chosen_T)
    assert found.values_T.tolist() == [1.0, 0.0, 3.0]
    assert found.silent_T.tolist() == [False, True, True]  # the last has no advantage
    assert (found.coefficient, found.weight, set(found.extras)) == (0.5, "token", {"mine", "high_entropy"})


def test_policy_term_and_bonus_are_confined_and_penalties_are_not():
    spec = LossSpec(name="reinforce", top_entropy_share=0.3, entropy_coefficient=0.1, kl={"coefficient": 0.2})
    inputs = inputs_of()
    terms = make_loss(spec)(inputs)
    assert torch.nonzero(terms["policy"].values_T).squeeze(1).tolist() == [1, 4]
    assert torch.nonzero(terms["entropy"].values_T).squeeze(1).tolist() == [1, 4]
    assert torch.nonzero(terms["kl"].values_T).squeeze(1).tolist() == [0, 1, 3, 4, 5]
    terms["policy"].values_T.sum().backward()
    assert torch.nonzero(inputs.policy_logprobs_T.grad).squeeze(1).tolist() == [1, 4]


def test_it_is_declared_that_the_share_is_of_what_a_rank_holds():
    assert LossSpec(top_entropy_share=0.2).breaks == ("micro_batch", "packing", "dp", "cp")
    assert LossSpec(top_entropy_share=1.0).breaks == ()
    local = LossSpec(entropy_denominator="local_token")
    assert (local.breaks, local.model_copy(update={"entropy_coefficient": 0.1}).breaks) == (
        (),
        ("micro_batch", "packing", "dp"),
    )
