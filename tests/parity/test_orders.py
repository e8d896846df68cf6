"""Every token order gives the oracle's loss and gradients, whatever documents, padding and micro-batches.

By transitivity, as in test_layouts: oracle = one rank = every order here, in real gloo processes.
"""

import pytest
import torch

from tests.helpers.bars import assert_float64_parity
from tests.helpers.ranks import run_ranks
from tests.parity.cases import many_steps, one_step
from tests.parity.test_layouts import settings
from tests.parity.test_oracle import documents_near, oracle

ORDERS = {
    "striped": {"order": "striped"},
    "document_zigzag": {"order": "document_zigzag"},
    "whole_documents": {"order": "whole_documents", "attention": "ring"},
    "balanced": {"order": "balanced", "block_tokens": 4},
}
MESHES = {"cp2": {"cp": 2}, "cp4": {"cp": 4}, "dp2_cp2": {"dp": 2, "cp": 2}}


@pytest.fixture(scope="module")
def truth():
    """Documents and the oracle's results, computed once."""
    documents = documents_near(23)
    lonely = [d for d in documents if sum(d["loss_mask"]) == 0] + [max(documents, key=lambda d: len(d["tokens"]))]
    return {
        "document": (
            documents,
            {"denominator": "document", "data": {"micro_batches": 2}},
            oracle(documents, denominator="document"),
        ),
        "filled": (documents, {"data": {"micro_batch_tokens": 64}}, oracle(documents)),
        # One trained document for all ranks: with dp=2 one rank has a row of padding.
        "idle_rank": (lonely, {"data": {"micro_batches": 2}}, oracle(lonely)),
    }


@pytest.mark.parametrize(
    "mesh", [pytest.param(mesh, marks=() if mesh == "dp2_cp2" else pytest.mark.slow) for mesh in MESHES]
)
def test_an_order_gives_the_oracles_gradients(mesh, truth, tmp_path):
    asked = [(order, case) for order in ORDERS for case in truth]
    cases = [(settings(MESHES[mesh] | ORDERS[order], **truth[case][1]), truth[case][0]) for order, case in asked]
    world = MESHES[mesh].get("dp", 1) * MESHES[mesh]["cp"]
    for rank, answers in enumerate(run_ranks(many_steps, world, tmp_path, cases)):
        for (order, case), actual in zip(asked, answers, strict=True):
            expected_loss, expected, logprobs = truth[case][2]
            context = f"{order}, {mesh}, case {case}, rank {rank}"
            assert abs(actual["loss"] - expected_loss) <= 1e-12 * max(1, abs(expected_loss)), context
            assert_float64_parity(actual["gradients"], expected, context=context)
            flat = torch.tensor([v for document in logprobs for v in document], dtype=torch.float64)
            where = actual["tokens"]["trained"]
            torch.testing.assert_close(actual["tokens"]["policy_logprobs"][where], flat[where], rtol=0, atol=1e-12)


def test_metrics_trained_tokens_and_losses_on_documents_are_those_of_one_rank(truth, tmp_path):
    documents = truth["document"][0]
    full = {"record": {"metrics": "full"}}
    losses = [
        full,
        full | {"loss": {"name": "gspo"}},
        full | {"loss": {"name": "grpo", "surrogate": {"kind": "cispo", "level": "segment"}}},
    ]
    asked = [(loss, layout) for loss in losses for layout in ORDERS.values()]
    cases = [(settings({"cp": 2} | layout) | loss, documents) for loss, layout in asked]
    answers = run_ranks(many_steps, 2, tmp_path, cases)[1]
    for number, loss in enumerate(losses):
        whole = one_step(settings({}) | loss, documents)
        for (_, layout), actual in list(zip(asked, answers, strict=True))[number * len(ORDERS) :][: len(ORDERS)]:
            assert_float64_parity(actual["gradients"], whole["gradients"], context=f"{loss}, {layout}")
            assert actual["metrics"] == pytest.approx(whole["metrics"], rel=1e-9, abs=1e-12), (loss, layout)
            assert torch.equal(actual["tokens"]["trained"], whole["tokens"]["trained"])
            assert torch.equal(actual["tokens"]["targets"], whole["tokens"]["targets"])
