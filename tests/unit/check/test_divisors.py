"""Wrong divisors: factors of each token's weight, by their formulas."""

import torch

from tests.helpers.dumped_step import SETTINGS, dump
from workbench.check import check_step
from workbench.check.divisors import wrong_divisors
from workbench.check.reading import Reading
from workbench.check.recompute import weights_of
from workbench.specs.losses import LossSpec


def weights(text, **settings):
    step = dump(layout={"dp": 2, "micro_batches": 2}, documents={"rows": torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])})
    reading = Reading(step, LossSpec(**{**SETTINGS, **settings}))
    known = {description: changed for _, description, changed in wrong_divisors(reading)}
    changed = known[text]
    return step, weights_of(reading) * changed.scale.loss_T, changed


def test_a_ranks_own_tokens_averaged():
    step, weights_T, changed = weights("the loss is divided by the trained tokens of its own rank, then averaged")
    ranks_T = step.documents["rows"][step.document_ids_T] // 2
    for rank in (0, 1):
        own_T = weights_T[(ranks_T == rank) & step.loss_mask_T]
        torch.testing.assert_close(own_T.sum(), torch.tensor(0.5).double())
        assert own_T.unique().numel() == 1
    assert changed.scale.of == ""


def test_all_tokens_have_their_count():
    text = "the loss is divided by all tokens of completions, a tool's and masked documents' too"
    step, weights_T, changed = weights(text)
    total = float(step.tokens["token_mask"].sum())
    assert changed.counts == {"tokens": total}
    torch.testing.assert_close(weights_T[step.loss_mask_T], torch.full((33,), 1 / total).double())


def test_one_term_alone():
    _, _, changed = weights("the KL penalty is divided by documents, each over its own tokens, the other term is not")
    assert changed.scale.of == "penalty"


def test_a_lost_micro_batch_loses_gradients_and_perhaps_the_loss():
    text = "only the last micro-batch of each rank trains: gradients of the others are lost"
    step, _, changed = weights(text)
    last_T = (step.documents["rows"] % 2 == 1)[step.document_ids_T].double()
    assert torch.equal(changed.scale.gradient_T, last_T)
    assert bool((changed.scale.loss_T == 1).all())


def test_a_penalty_with_a_divisor_of_its_own_is_scaled_from_that():
    settings = {**SETTINGS, "compat": {"kl_denominator": "document"}}
    result = check_step(dump(), settings=settings)  # whose penalty is divided by tokens, as the policy term is
    assert result.first.name == "coefficients"
    text = "the KL penalty is divided by all trained tokens of the step, the other term is not"
    assert text in [cause.description for cause in result.causes]
    known = [text for _, text, _ in wrong_divisors(Reading(dump(), LossSpec(**settings)))]
    assert "the KL penalty is divided by documents, each over its own tokens, the other term is not" not in known
    assert "the policy term is divided by documents, each over its own tokens, the other term is not" in known
