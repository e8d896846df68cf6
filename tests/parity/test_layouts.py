"""Every layout, in real gloo processes, gives the oracle's loss and gradients.

By transitivity: oracle = one rank (test_oracle) = every layout (here). Layouts of as many ranks run a list of cases
each in one set of processes: tied and untied heads, both denominators, micro-batches, a rank with nothing to train.
"""

import pytest
import torch

from tests.helpers.bars import assert_float64_parity
from tests.parity.cases import in_shared_processes, one_step
from tests.parity.test_oracle import LOSS, documents_near, oracle

LAYOUTS = {
    "cp2_contiguous": {"cp": 2, "order": "contiguous"},
    "cp2_zigzag": {"cp": 2, "order": "zigzag"},
    "tp2": {"tp": 2},
    "dp2": {"dp": 2},
    "cp4_zigzag": {"cp": 4, "order": "zigzag"},
    "dp2_cp2": {"dp": 2, "cp": 2, "order": "zigzag"},
    "cp2_tp2": {"cp": 2, "tp": 2, "order": "zigzag"},
    "dp2_tp2": {"dp": 2, "tp": 2},
    "pp2": {"pp": 2},
    "pp2_dp2": {"pp": 2, "dp": 2, "pipeline_schedule": "gpipe"},
}
MEASURED = ("dp2_cp2", "pp2_dp2")
"""Layouts whose metrics are compared."""


def settings(layout, **more):
    loss = LOSS | {"denominator": more.pop("denominator", "token")}
    tied = more.pop("tied", True)
    return {
        "model": {"source": "tiny-qwen3", "tied": tied, "seed": 3},
        "precision": "float64",
        "loss": loss,
        "layout": layout,
    } | more


@pytest.fixture(scope="module")
def truth():
    """Documents and the oracle's results, computed once."""
    documents, untied = documents_near(11), documents_near(11, tied=False)
    lonely = [d for d in documents if sum(d["loss_mask"]) == 0] + [max(documents, key=lambda d: len(d["tokens"]))]
    return {
        "token": (documents, {}, oracle(documents)),
        "document": (documents, {"denominator": "document"}, oracle(documents, denominator="document")),
        "untied": (untied, {"tied": False}, oracle(untied, tied=False)),
        "micro_batches": (documents, {"data": {"micro_batches": 2}}, oracle(documents)),
        # One trained document for all ranks: with dp=2 one rank trains nothing at all.
        "idle_rank": (lonely, {}, oracle(lonely)),
    }


@pytest.fixture(scope="module")
def on_ranks(truth, tmp_path_factory):
    """Every rank's results of all cases in each layout."""
    asked = {
        name: [(settings(layout, **more), documents) for documents, more, _ in truth.values()]
        for name, layout in LAYOUTS.items()
    }
    return in_shared_processes(asked, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_gives_the_oracles_gradients(name, truth, on_ranks):
    layout, per_rank = LAYOUTS[name], on_ranks[name]
    for number, (case, (_, _, (expected_loss, expected, logprobs))) in enumerate(truth.items()):
        for rank, answers in enumerate(per_rank):
            context = f"{name}, case {case}, rank {rank}"
            actual = answers[number]
            assert abs(actual["loss"] - expected_loss) <= 1e-12 * max(1, abs(expected_loss)), context
            assert_float64_parity(actual["gradients"], expected, context=context)
            flat = torch.tensor([v for document in logprobs for v in document], dtype=torch.float64)
            where = actual["tokens"]["trained"]
            torch.testing.assert_close(actual["tokens"]["policy_logprobs"][where], flat[where], rtol=0, atol=1e-12)
            for parameter, norm in actual["norms"].items():
                assert norm == pytest.approx(float(expected[parameter].norm()), rel=1e-9, abs=1e-12), context
    if "dp" in layout:
        idle = [answers[list(truth).index("idle_rank")]["trained_here"] for answers in per_rank]
        assert 0 in idle, "one rank of the idle case must have had nothing to train"


def test_trained_tokens_are_the_same_set_in_every_layout(truth, on_ranks):
    documents, _, _ = truth["token"]
    whole = torch.tensor([m for d in documents for m in d["loss_mask"]]).bool()
    tokens = torch.tensor([t for d in documents for t in d["tokens"]])
    kept = on_ranks["dp2_cp2"][0][list(truth).index("token")]["tokens"]
    assert torch.equal(kept["trained"], whole)
    assert torch.equal(kept["targets"][whole], tokens[whole])


@pytest.mark.parametrize("name", MEASURED)
def test_metrics_are_those_of_one_rank(name, truth, on_ranks):
    documents, _, _ = truth["micro_batches"]
    expected = one_step(settings({}), documents)["metrics"]
    assert expected["tokens/trained/sum"] == sum(sum(d["loss_mask"]) for d in documents)
    for rank, answers in enumerate(on_ranks[name]):
        metrics = answers[list(truth).index("micro_batches")]["metrics"]
        assert metrics == pytest.approx(expected, rel=1e-10), f"rank {rank}"
