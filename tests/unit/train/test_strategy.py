"""A step takes one strategy, and strategies differ in named functions alone."""

from dataclasses import fields

import pytest

from workbench.train import exact
from workbench.train import step as flow
from workbench.train.strategy import loss_after


@pytest.mark.parametrize(
    ("reproducible", "fused", "strategy"),
    [(False, False, flow.PLAIN), (False, True, flow.FUSED), (True, False, exact.REPRODUCIBLE)],
)
def test_a_step_chooses_by_its_policy_and_its_head(reproducible, fused, strategy):
    assert flow.choose_strategy(reproducible=reproducible, fused=fused) is strategy


def test_a_fused_step_differs_in_the_head_alone():
    differing = {f.name for f in fields(flow.PLAIN) if getattr(flow.PLAIN, f.name) is not getattr(flow.FUSED, f.name)}
    assert differing == {"head", "row_loss"}


def test_the_loss_is_evaluated_on_the_tokens_that_the_head_returns():
    seen = []

    def head(policy, hidden_TD, local, loss):
        return f"whole {local}", f"outputs of {hidden_TD}"

    def loss(local, head_output):
        seen.append((local, head_output))
        return "evaluated"

    assert loss_after(head)("policy", "hidden", "row", loss) == ("whole row", "evaluated", None)
    assert seen == [("whole row", "outputs of hidden")]
