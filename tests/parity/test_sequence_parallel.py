"""Sequence parallelism gives the oracle's loss and gradients: tokens between cut layers lie over tp.

oracle = one rank (test_oracle) = every layout with tokens sharded over tp (here): tied and untied heads, micro-batches,
a vocabulary of 19 over two ranks, ranks without anything to train.
"""

import pytest

from tests.helpers.bars import assert_float64_parity
from tests.parity.cases import in_shared_processes
from tests.parity.test_layouts import settings
from tests.parity.test_oracle import documents_near, oracle

LAYOUTS = {
    "tp2": {"tp": 2},
    "cp2_tp2": {"cp": 2, "tp": 2, "order": "zigzag"},
    "dp2_tp2": {"dp": 2, "tp": 2, "checkpointing": True, "shard_parameters": True},
}


@pytest.fixture(scope="module")
def truth():
    """Documents and the oracle's results, computed once."""
    documents, untied = documents_near(11), documents_near(12, tied=False)
    return {
        "micro_batches": (documents, {"data": {"micro_batches": 3}}, oracle(documents)),
        "untied, fused": (untied, {"tied": False, "policy": {"fused_loss": True}}, oracle(untied, tied=False)),
    }


@pytest.fixture(scope="module")
def on_ranks(truth, tmp_path_factory):
    """Every rank's results of all cases in each layout."""
    asked = {
        name: [
            (settings(layout | {"sequence_parallel": True}, **more), documents) for documents, more, _ in truth.values()
        ]
        for name, layout in LAYOUTS.items()
    }
    return in_shared_processes(asked, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_tokens_over_tp_give_the_oracles_gradients(name, truth, on_ranks):
    for number, (case, (_, _, (expected_loss, expected, _))) in enumerate(truth.items()):
        for rank, answers in enumerate(on_ranks[name]):
            context = f"{name}, {case}, rank {rank}"
            assert abs(answers[number]["loss"] - expected_loss) <= 1e-12 * max(1, abs(expected_loss)), context
            assert_float64_parity(answers[number]["gradients"], expected, context=context)
            for parameter, norm in answers[number]["norms"].items():
                assert norm == pytest.approx(float(expected[parameter].norm()), rel=1e-9, abs=1e-12), context
