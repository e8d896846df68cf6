import pytest
import torch

from workbench.losses.build import make_loss
from workbench.losses.terms import Term
from workbench.prove.arrangement import one_rank_policy, one_row, perform
from workbench.prove.documents import draw_documents
from workbench.prove.subject import WorkbenchSubject
from workbench.specs.run import RunSpec


def plain(inputs):
    return {"policy": Term(-(inputs.log_ratio().exp() * inputs.counted_advantages_T))}


def test_a_step_measures_every_metric_that_its_spec_allows():
    documents = draw_documents("2", one_rank_policy())
    bounded = RunSpec(loss={"name": "ppo"})
    whole = perform(WorkbenchSubject("ppo", bounded, make_loss(bounded.loss)), one_row(documents))
    own = perform(WorkbenchSubject("plain", RunSpec(), plain, from_spec=False), one_row(documents))
    assert len(whole.metrics) > len(own.metrics) > 40
    assert "clip/policy/fraction" in whole.metrics.keys() - own.metrics.keys(), "no clip, and no metric of one"
    same = RunSpec(loss={"name": "importance_sampling"})
    named = perform(WorkbenchSubject("same", same, make_loss(same.loss)), one_row(documents))
    assert named.loss == pytest.approx(own.loss, rel=1e-13)
    for name, gradient in own.gradients.items():
        torch.testing.assert_close(named.gradients[name], gradient, rtol=0, atol=1e-13)


def test_it_declares_what_its_spec_does():
    spec = RunSpec(loss={"name": "bnpo"})
    assert WorkbenchSubject("bnpo", spec, make_loss(spec.loss)).declared == ("micro_batch", "packing", "dp")
