"""Stored gradients are what was recorded, or refused by name: norms find what moves a norm, certificates every bit."""

import math

import pytest
import torch

from workbench.errors import RecordError
from workbench.records.certificate import Certificate, fingerprint_label
from workbench.records.integrity import check_certificate, check_gradients

WHERE = "record mine: tensors/step0000.gradients"


@pytest.fixture
def gradients():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(6, 8, generator=generator) for name in ("a.weight", "b.weight", "c.weight")}


def norms_of(gradients):
    return {name: float(values.double().norm()) for name, values in gradients.items()}


def problem(check, *arguments):
    """What a check says is damaged, "" if nothing."""
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
        found = caught.value.parts
        assert found["requested"] == f"read {WHERE}"
        assert found["found"].startswith("parameter b.weight has norm ")
        assert found["found"].endswith(f"recorded {norms['b.weight']!r}")
        assert "damaged" in found["fix"]

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

    def test_of_two_tensors_that_lost_their_content_share_no_factor(self, gradients):
        lost = {name: torch.zeros_like(values) for name, values in gradients.items()}
        found = problem(check_gradients, lost, norms_of(gradients))
        assert found.startswith("parameter a.weight has norm 0.0")
        assert "and 2 more" in found

    def test_of_parameters_that_were_not_stored_are_not_looked_at(self, gradients):
        norms = norms_of(gradients)
        assert problem(check_gradients, {"a.weight": gradients["a.weight"]}, norms) == ""
        assert problem(check_gradients, gradients, {"a.weight": norms["a.weight"]}) == ""


class TestCertificate:
    @pytest.fixture
    def certificate(self, gradients):
        return Certificate({f"gradient/{name}": fingerprint_label(values) for name, values in gradients.items()})

    def test_of_the_stored_bits_passes(self, gradients, certificate):
        assert problem(check_certificate, gradients, certificate) == ""

    def test_sees_the_last_bit_of_an_element_that_no_norm_shows(self, gradients, certificate):
        least = int(gradients["c.weight"].abs().argmin())
        damaged = gradients | {"c.weight": flip(gradients["c.weight"], least, 0)}
        assert problem(check_gradients, damaged, norms_of(gradients)) == ""
        found = problem(check_certificate, damaged, certificate)
        assert found.startswith("parameter c.weight has fingerprint float32 ")
        assert ", certified float32 " in found

    def test_sees_another_dtype(self, gradients, certificate):
        stored = {name: values.double() for name, values in gradients.items()}
        assert "a.weight has fingerprint float64" in problem(check_certificate, stored, certificate)

    def test_says_nothing_of_replicas_that_were_unlike(self, gradients, certificate):
        stored = gradients | {"a.weight": gradients["a.weight"] + 1}
        assert "a.weight" in problem(check_certificate, stored, certificate)
        unlike = Certificate(certificate.fingerprints, ("gradient/a.weight",))
        assert problem(check_certificate, stored, unlike) == ""
