"""What the bits depend on makes sense, and errors survive the way to another process."""

import pickle

import pytest

from workbench.errors import SpecError
from workbench.reproducible.resolution import OutOfRange, Resolution


@pytest.mark.parametrize(("tokens", "chunks"), [(0, 1), (8, 0), (8, 3), (8, -2), (-1, 1)])
def test_pieces_that_make_no_sense_are_refused(tokens, chunks):
    with pytest.raises(SpecError, match="a power of two"):
        Resolution(tokens, chunks)


def test_an_error_keeps_its_bits_when_it_is_pickled():
    for bits in (27, None):
        error = pickle.loads(pickle.dumps(OutOfRange.because("a peak", bits)))
        assert error.bits == bits
        assert "a peak" in str(error)
    assert "exact.start(bits=27)" in str(OutOfRange.because("a peak", 27))
