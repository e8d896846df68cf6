"""What recorded values show by themselves: factors, orders, pieces, lost tokens, rounding, whole divisors, counts."""

import torch

from tests.helpers.dumped_step import SETTINGS, dump
from workbench.check.fitted import (
    common_factor,
    fitted_count,
    fitted_divisor,
    fitted_mask,
    fitted_order,
    fitted_pieces,
    fitted_rounding,
)
from workbench.check.numbers import recompute_numbers
from workbench.check.reading import Reading
from workbench.specs.losses import LossSpec

STEP = dump(layout={"dp": 2}, documents={"rows": torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])})
READING = Reading(STEP, LossSpec(**SETTINGS), ("grpo", {"epsilon": 1e-4}))
C, BOUND = STEP.tokens["coefficients"], torch.full((56,), 1e-12).double()


def test_a_factor_needs_every_token():
    assert common_factor(STEP, 3 * C, C, BOUND)[0] == 3
    assert common_factor(STEP, torch.where(torch.arange(56) == 28, C, 3 * C), C, BOUND) is None
    assert common_factor(STEP, C, C, BOUND) is None


def test_a_whole_number_divides():
    assert list(fitted_divisor(READING, 33 / 47)) == ["the loss is divided by 47 trained tokens, not by 33"]
    assert not list(fitted_divisor(READING, 33 / 47.3))


def test_pieces_have_factors():
    ranks_T = STEP.documents["rows"][STEP.document_ids_T]
    assert list(fitted_pieces(STEP, C * (ranks_T == 0), C, BOUND)) == [("mask", "ranks 1 do not train")]
    assert list(fitted_pieces(STEP, C * (1 + ranks_T), C, BOUND)) == [("factor", "ranks 1 times 2 = dp")]
    noise_T = torch.rand(56, generator=torch.Generator().manual_seed(0)).double()
    assert not list(fitted_pieces(STEP, C * noise_T, C, BOUND))


def test_lost_tokens_have_places():
    lost_T = C.clone()
    lost_T[[1, 30]] = 0
    assert list(fitted_mask(STEP, 2 * lost_T, C, BOUND)) == [
        "2 tokens do not train: document 0, token 1; document 4, token 2"
    ]
    assert not list(fitted_mask(STEP, C, C, BOUND))


def test_rounding_is_exact():
    assert list(fitted_rounding("coefficients", C.bfloat16().double(), C, "float32")) == [
        "coefficients rounded to bfloat16"
    ]
    assert not list(fitted_rounding("coefficients", C.float().double(), C, "float32"))


def test_advantages_of_others():
    null = recompute_numbers(READING)
    expected_T = null.expected["advantages"]
    own = STEP.documents["advantages"].clone()
    own[[0, 5]] = own[[5, 0]]
    moved_T = torch.where(STEP.loss_mask_T, own[STEP.document_ids_T], 0)
    [text] = fitted_order(READING, null, moved_T, expected_T)
    assert "0 has that of 5" in text
    assert "5 has that of 0" in text.replace("0 or 3", "0")


def test_a_count_has_a_name():
    tokens = float(STEP.tokens["token_mask"].sum())
    assert "all tokens" in next(fitted_count(STEP, "tokens", tokens))
    assert not list(fitted_count(STEP, "tokens", 1000.0))
