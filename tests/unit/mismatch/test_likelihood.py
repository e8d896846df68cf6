from types import SimpleNamespace

import torch

from tests.helpers.gaps import computation, records
from workbench.mismatch.configuration import Configuration
from workbench.mismatch.likelihood import DECISIVE, OUTSIDE, evidence


def test_tokens_are_likelier_where_they_were_drawn():
    own = computation(records(temperature=0.6))
    right, wrong = Configuration(temperature=0.6), Configuration(temperature=1.0)
    assert evidence(own, right, wrong) > DECISIVE
    assert evidence(own, wrong, right) == -evidence(own, right, wrong)


def test_a_token_outside_the_support_counts_but_does_not_decide_alone():
    own = computation(records(temperature=1.0))
    against = evidence(own, Configuration(top_k=1), Configuration())
    assert -700 < against < -DECISIVE
    assert OUTSIDE < DECISIVE < 2 * OUTSIDE


def test_a_support_that_many_tokens_are_outside_of_was_not_in_force():
    """Rare tokens, however many, are no evidence for it: without the support they are as rare."""
    logits_TV = torch.randn(64, 4000, generator=torch.Generator().manual_seed(0)) / 10
    tokens_T = torch.randint(4000, (64,), generator=torch.Generator().manual_seed(1))
    own = SimpleNamespace(counted_T=torch.ones(64).bool(), logits_of=lambda *_: (logits_TV, tokens_T))
    assert evidence(own, Configuration(top_k=2000), Configuration()) < -DECISIVE


def test_where_values_were_taken_from_does_not_matter():
    own = computation()
    assert evidence(own, Configuration(offset="values +1"), Configuration()) == 0
