"""One loss under two names, by the weights of whole steps: identities that hold, and their limits.

(Identity c, GSPO-token and GSPO, is in surrogates/test_sequence.py.)
"""

import pytest
import torch

from workbench.losses import LossInputs, build_loss
from workbench.reduction.weights import step_weights
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.packing import pack
from workbench.rollouts.targets import shift_targets
from workbench.specs.losses import LossSpec

EQUAL = [6, 6, 6, 6]
UNEQUAL = [3, 9, 6, 14]
PLAIN = {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.28}
WIDE = {"clip_low": 0.2, "clip_high": 0.3}


def step(lengths, *, kl=0.0, **loss):
    """Loss and gradient of one row of documents with ``lengths`` trained tokens each, two documents a prompt."""
    generator = torch.Generator().manual_seed(0)
    batch = RolloutBatch.from_documents(
        [
            {
                "tokens": [1] * (n + 2),
                "loss_mask": [0, 0] + [1] * n,
                "advantages": (-1.0) ** d * (1 + d),
                "reward": 0.0,
                "old_logprobs": [-2.0] * (n + 2),
                "ref_logprobs": [-1.9] * (n + 2),
                "group_id": d // 2,
            }
            for d, n in enumerate(lengths)
        ]
    )
    (row,) = (shift_targets(packed) for packed in pack(batch, rows=1, multiple_of=1))
    spec = LossSpec(kl={"coefficient": kl}, **loss)
    (weights,), _ = step_weights([row], spec)
    noise_T = 0.3 * torch.randn(len(row.tokens_T), generator=generator, dtype=torch.float64)
    policy_T = (row.old_logprobs_T.double() + noise_T).requires_grad_()
    inputs = LossInputs(
        policy_T,
        row.old_logprobs_T.double(),
        row.advantages_T.double(),
        None,
        row.ref_logprobs_T.double(),
        loss_mask_T=row.loss_mask_T,
        document_ids_T=row.document_ids_T,
        lengths_T=row.lengths_T,
    )
    terms = build_loss(spec)(inputs)
    total = sum(
        (term.coefficient * torch.where(row.loss_mask_T, term.values_T, 0.0) * weights["policy"].loss_T).sum()
        for term in terms.values()
    )
    total.backward()
    assert policy_T.grad.abs().max() > 1e-3
    return total.item(), policy_T.grad


def assert_same(one, other, factor=1.0):
    assert one[0] == pytest.approx(factor * other[0], rel=1e-12)
    torch.testing.assert_close(one[1], factor * other[1], rtol=1e-12, atol=1e-15)


def differ(one, other):
    return (one[1] - other[1]).abs().max() > 1e-3 * other[1].abs().max()


@pytest.mark.parametrize("other", ["document", "prompt_group"])
def test_documents_of_one_length_have_one_mean(other):
    token, another = (step(EQUAL, surrogate=PLAIN, denominator=name) for name in ("token", other))
    assert_same(another, token)
    assert differ(*(step(UNEQUAL, surrogate=PLAIN, denominator=name) for name in ("token", other)))


@pytest.mark.parametrize("lengths", [EQUAL, UNEQUAL])
def test_luspo_is_gspo_summed_over_documents(lengths):
    luspo = step(lengths, name="luspo", surrogate=WIDE)
    assert_same(luspo, step(lengths, name="gspo", surrogate=WIDE, denominator="document_sum"))


def test_luspo_does_not_multiply_the_penalty_by_the_length():
    luspo, gspo = (step(UNEQUAL, kl=0.1, name=name, surrogate=WIDE) for name in ("luspo", "gspo"))
    without = [step(UNEQUAL, name=name, surrogate=WIDE) for name in ("luspo", "gspo")]
    torch.testing.assert_close(luspo[1] - without[0][1], gspo[1] - without[1][1], rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize(("constant", "factor"), [(sum(UNEQUAL) / 4, 1.0), (100.0, sum(UNEQUAL) / 400)])
def test_dr_grpo_is_the_token_mean_times_tokens_over_documents_times_the_constant(constant, factor):
    dr_grpo = step(UNEQUAL, name="dr_grpo", denominator_constant=constant)
    assert_same(dr_grpo, step(UNEQUAL, name="grpo"), factor)


def test_two_sided_is_ppo_until_a_ratio_is_beyond_delta():
    assert_same(step(UNEQUAL, name="two_sided"), step(UNEQUAL, name="ppo"))
    assert differ(step(UNEQUAL, name="two_sided", surrogate={"delta": 1.3}), step(UNEQUAL, name="ppo"))
