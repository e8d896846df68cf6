"""Stored gradients match their records, or are refused by name: norms detect changed norms, certificates any bit."""

import math

import pytest
import torch

from workbench.errors import RecordError
from workbench.records.integrity import check_gradients, piece_of_norm

WHERE = "record mine: tensors/step0000.gradients"


@pytest.fixture
def gradients():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(6, 8, generator=generator) for name in ("a.weight", "b.weight", "c.weight")}


def norms_of(gradients):
    return {name: float(values.double().norm()) for name, values in gradients.items()}


def problem(check, *arguments):
    """The damage that a check reports, "" if none."""
    try:
        check(*arguments, where=WHERE)
    except RecordError as error:
        return error.parts["found"]
    return ""


def flip(values, at, bit):
    """Another tensor with one bit of one element flipped."""
    bits = values.clone().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])
    bits.view(-1)[at] ^= 1 << bit
    return bits.view(values.dtype)


class TestNorms:
    def test_of_the_stored_tensors_pass(self, gradients):
        assert problem(check_gradients, gradients, norms_of(gradients)) == ""

    @pytest.mark.parametrize("bit", [24, 28, 30])
    def test_a_flipped_exponent_bit_is_named_with_parameter_and_both_norms(self, gradients, bit):
        norms = norms_of(gradients)
        largest = int(gradients["b.weight"].abs().argmax())
        damaged = gradients | {"b.weight": flip(gradients["b.weight"], largest, bit)}
        with pytest.raises(RecordError) as caught:
            check_gradients(damaged, norms, where=WHERE)
        result = caught.value.parts
        assert result["requested"] == f"read {WHERE}"
        assert result["found"].startswith("parameter b.weight has norm ")
        assert result["found"].endswith(f"recorded {norms['b.weight']!r}")
        assert "damaged" in result["fix"]

    @pytest.mark.parametrize(
        ("dtype", "off", "refused"),
        [
            (torch.bfloat16, 0.01, False),
            (torch.bfloat16, 0.1, True),
            (torch.float32, 3e-7, False),
            (torch.float32, 1e-5, True),
            (torch.float64, 1e-15, False),
            (torch.float64, 1e-9, True),
        ],
    )
    def test_may_round_as_the_dtype_does_and_no_further(self, gradients, dtype, off, refused):
        stored = {name: values.to(dtype) for name, values in gradients.items()}
        norms = norms_of(stored)
        norms["a.weight"] *= 1 + off
        assert ("a.weight" in problem(check_gradients, stored, norms)) is refused

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_that_are_not_finite_equal_themselves_and_nothing_else(self, gradients, value):
        broken = gradients | {"a.weight": torch.full((3,), value)}
        norms = norms_of(broken)
        assert problem(check_gradients, broken, norms) == ""
        assert "a.weight" in problem(check_gradients, broken, norms | {"a.weight": 1.0})
        assert "b.weight" in problem(check_gradients, broken, norms | {"b.weight": value})

    @pytest.mark.parametrize("reported", [("a.weight", "b.weight", "c.weight"), ("a.weight", "c.weight")])
    def test_that_are_all_off_by_one_factor_are_a_wrong_report_and_no_damage(self, gradients, reported):
        norms = norms_of(gradients)
        norms |= {name: norms[name] / 2 for name in reported}
        assert problem(check_gradients, gradients, norms) == ""
        norms["b.weight"] *= 0.71
        assert "b.weight" in problem(check_gradients, gradients, norms)

    @pytest.mark.parametrize(("dim", "pieces", "halves"), [(0, 2, 1), (0, 4, 1), (1, 3, 1), (0, 2, 2)])
    def test_of_one_slice_are_a_wrong_report_and_no_damage(self, gradients, dim, pieces, halves):
        """A norm that misses the slices of other ranks, of a gated projection those of both halves."""
        values = torch.randn(8, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        parts = [half.chunk(pieces, dim)[0] for half in values.chunk(halves, dim)]
        stored, norms = gradients | {"w": values}, norms_of(gradients)
        own = float(torch.cat(parts, dim).norm())
        assert problem(check_gradients, stored, norms | {"w": own}) == ""
        assert piece_of_norm(values, own) == (dim, pieces)
        for wrong in (own * 1.01, 0.0, math.nan):
            assert piece_of_norm(values, wrong) is None
            assert "parameter w" in problem(check_gradients, stored, norms | {"w": wrong})

    def test_of_two_tensors_that_lost_their_content_share_no_factor(self, gradients):
        lost = {name: torch.zeros_like(values) for name, values in gradients.items()}
        result = problem(check_gradients, lost, norms_of(gradients))
        assert result.startswith("parameter a.weight has norm 0.0")
        assert "and 2 more" in result

    def test_of_parameters_that_were_not_stored_are_not_looked_at(self, gradients):
        norms = norms_of(gradients)
        assert problem(check_gradients, {"a.weight": gradients["a.weight"]}, norms) == ""
        assert problem(check_gradients, gradients, {"a.weight": norms["a.weight"]}) == ""
