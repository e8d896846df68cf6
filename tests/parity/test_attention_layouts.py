"""Every way to come to each other's keys and values gives the oracle's loss and gradients, in real gloo processes.

By transitivity, as in test_layouts: oracle = one rank = every layout here. Layouts of one size share processes.
"""

import pytest
import torch

from tests.helpers.bars import assert_float64_parity
from tests.helpers.ranks import run_ranks
from tests.oracles.step import exact, grpo_step
from tests.parity.cases import many_steps
from tests.parity.test_layouts import settings
from tests.parity.test_oracle import PAPER, documents_near, oracle
from workbench.policy.decoder import tiny_qwen3

LAYOUTS = {
    2: {
        "ring": ("token", {"cp": 2, "order": "zigzag", "attention": "ring"}),
        "ring_idle": ("idle_rank", {"cp": 2, "order": "striped", "attention": "ring", "checkpointing": True}),
        "ulysses": ("document", {"cp": 2, "order": "zigzag", "attention": "ulysses"}),
        "ulysses_idle": ("idle_rank", {"cp": 2, "attention": "ulysses", "kernel": "plain"}),
        "gathered_again": ("untied", {"cp": 2, "order": "balanced", "block_tokens": 4, "checkpointing": True}),
        "gathered_window": ("window", {"cp": 2, "order": "zigzag"}),
        "ring_window": ("window", {"cp": 2, "order": "contiguous", "attention": "ring"}),
    },
    4: {
        "ring": ("token", {"cp": 4, "order": "document_zigzag", "attention": "ring"}),
        "ring_of_two_rows": ("idle_rank", {"dp": 2, "cp": 2, "order": "zigzag", "attention": "ring"}),
        "ring_of_half_the_heads": ("untied", {"cp": 2, "tp": 2, "order": "zigzag", "attention": "ring"}),
        "ulysses_of_repeated_heads": ("document", {"cp": 4, "order": "zigzag", "attention": "ulysses"}),
        "ulysses_of_local_heads": ("token", {"cp": 2, "tp": 2, "attention": "ulysses", "checkpointing": True}),
        "hybrid": ("token", {"cp": 4, "order": "zigzag", "attention": "hybrid", "ulysses": 2}),
        "hybrid_idle": ("idle_rank", {"cp": 4, "order": "contiguous", "attention": "hybrid", "ulysses": 2}),
        "hybrid_window": ("window", {"cp": 4, "order": "striped", "attention": "hybrid", "ulysses": 2}),
    },
}


def windowed(folder):
    """A saved Qwen3 with a window of four tokens in its first and last layers."""
    model = tiny_qwen3(19, seed=3)
    model.config.use_sliding_window, model.config.sliding_window = True, 4
    model.config.layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """Documents, settings and the oracle's results, computed once."""
    folder = tmp_path_factory.mktemp("windowed")
    documents, untied = documents_near(11), documents_near(11, tied=False)
    lonely = [d for d in documents if sum(d["loss_mask"]) == 0] + [max(documents, key=lambda d: len(d["tokens"]))]
    seen = grpo_step(exact(windowed(folder)), documents, **PAPER, denominator="token", temperature=1.0)
    return {
        "token": (documents, {"data": {"micro_batches": 2}}, oracle(documents)),
        "document": (documents, {"denominator": "document"}, oracle(documents, denominator="document")),
        "untied": (untied, {"tied": False}, oracle(untied, tied=False)),
        # One trained document for all ranks: with dp=2 one rank has a row of padding.
        "idle_rank": (lonely, {}, oracle(lonely)),
        "window": (documents, {"model": {"source": str(folder)}}, seen),
    }


@pytest.mark.parametrize("world", LAYOUTS)
def test_a_layout_gives_the_oracles_gradients(world, truth, tmp_path):
    asked = {name: (case, settings(layout, **truth[case][1])) for name, (case, layout) in LAYOUTS[world].items()}
    cases = [(given, truth[case][0]) for case, given in asked.values()]
    for rank, answers in enumerate(run_ranks(many_steps, world, tmp_path, cases)):
        for (name, (case, _)), actual in zip(asked.items(), answers, strict=True):
            expected_loss, expected, logprobs = truth[case][2]
            context = f"{name}, case {case}, rank {rank}"
            assert abs(actual["loss"] - expected_loss) <= 1e-12 * max(1, abs(expected_loss)), context
            assert_float64_parity(actual["gradients"], expected, context=context)
            flat = torch.tensor([v for document in logprobs for v in document], dtype=torch.float64)
            where = actual["tokens"]["trained"]
            torch.testing.assert_close(actual["tokens"]["policy_logprobs"][where], flat[where], rtol=0, atol=1e-12)


def test_a_window_changes_the_outputs(truth):
    assert abs(truth["window"][2][0] - truth["token"][2][0]) > 1e-3
