"""The gradient in the forward pass, in real gloo processes: the same loss, gradients, tokens and metrics as without."""

import pytest
import torch

from tests.helpers.bars import assert_float64_parity
from tests.helpers.ranks import run_ranks
from tests.parity.cases import many_steps, one_step
from tests.parity.test_layouts import LAYOUTS, settings
from tests.parity.test_oracle import LOSS, documents_near, oracle

CHUNKS = {"policy": {"fused_loss": True, "chunk_tokens": 7}}
GSPO = {"name": "gspo", "surrogate": {"clip_low": 0.05, "clip_high": 0.08}, "denominator": "document"}
WITH_ENTROPY = LOSS | {"entropy_coefficient": 0.02, "squared_logit_coefficient": 1e-3}
KL_COV = {"name": "kl_cov"}
"""Its selection is of the tokens that a rank holds: the layout is part of the loss."""


def cases(layout):
    """Settings without fusion and documents, by name."""
    documents = documents_near(11)
    lonely = [d for d in documents if sum(d["loss_mask"]) == 0] + [max(documents, key=lambda d: len(d["tokens"]))]
    return {
        "grpo": (settings(layout), documents),
        "entropy": (settings(layout) | {"loss": WITH_ENTROPY}, documents),
        "untied": (settings(layout, tied=False, data={"micro_batches": 2}), documents_near(11, tied=False)),
        "gspo": (settings(layout) | {"loss": GSPO}, documents),
        "kl_cov": (settings(layout) | {"loss": KL_COV}, documents),
        "idle_rank": (settings(layout), lonely),
    }


def check(layout, folder):
    chosen = cases(layout)
    asked = [(given | more, documents) for given, documents in chosen.values() for more in ({}, CHUNKS)]
    world = layout.get("dp", 1) * layout.get("cp", 1) * layout.get("tp", 1)
    for rank, answers in enumerate(run_ranks(many_steps, world, folder, asked)):
        for number, name in enumerate(chosen):
            without, result = answers[2 * number : 2 * number + 2]
            context = f"{layout}, {name}, rank {rank}"
            assert abs(result["loss"] - without["loss"]) <= 1e-12 * max(1, abs(without["loss"])), context
            assert_float64_parity(result["gradients"], without["gradients"], context=context)
            assert result["metrics"] == pytest.approx(without["metrics"], rel=1e-9, abs=1e-12, nan_ok=True), context
            trained = without["tokens"]["trained"]
            for key, values in without["tokens"].items():
                torch.testing.assert_close(result["tokens"][key][trained], values[trained], rtol=0, atol=1e-12)
            says = {"gspo": layout.get("cp", 1) > 1, "kl_cov": result["trained_here"] > 7}.get(name, False)
            assert bool(result["fallbacks"]) == says, (context, result["fallbacks"])
            if name == "gspo" and says:
                assert (
                    "whose tokens lie on 2 cp ranks: it is evaluated between forward and backward, 4 GEMMs"
                    in (result["fallbacks"][0])
                )


@pytest.mark.parametrize("name", ["cp2_zigzag", "tp2"])
def test_a_layout_gives_the_same_with_and_without(name, tmp_path):
    check(LAYOUTS[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cp2_contiguous", "dp2", "dp2_cp2", "cp2_tp2", "dp2_tp2"])
def test_every_layout_gives_the_same_with_and_without(name, tmp_path):
    check(LAYOUTS[name], tmp_path)


def test_one_rank_is_the_paper():
    documents = documents_near(11)
    expected_loss, expected, logprobs = oracle(documents)
    result = one_step(settings({}) | CHUNKS, documents)
    assert abs(result["loss"] - expected_loss) <= 1e-12 * max(1, abs(expected_loss))
    assert_float64_parity(result["gradients"], expected, context="fused, one rank")
    flat = torch.tensor([v for document in logprobs for v in document], dtype=torch.float64)
    where = result["tokens"]["trained"]
    torch.testing.assert_close(result["tokens"]["policy_logprobs"][where], flat[where], rtol=0, atol=1e-12)
