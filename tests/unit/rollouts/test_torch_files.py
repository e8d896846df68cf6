"""Files of `torch.save` and pickles of tensors and arrays come back bit for bit, and execute nothing."""

import collections
import io
import pickle
import zipfile

import numpy as np
import pytest
import torch

from workbench.errors import RecordError, SpecError
from workbench.rollouts.pickles import Known
from workbench.rollouts.torch_files import read_restricted

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
ARRAYS = (
    np.arange(6, dtype=np.int32).reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.arange(3, dtype=">f4"),
    np.array(["ab", "c"]),
    np.array([b"ab", b"c"]),
    np.array([["u1", None], [{"a": 1}, 2]], dtype=object),
    np.zeros((0, 2)),
    np.array(2.5),
)


def content():
    base = torch.arange(12.0).reshape(3, 4)
    return {
        "tensors": {str(dtype): torch.arange(5).to(dtype) for dtype in DTYPES},
        "views": [base, base.t(), base[1:, ::2], base[0, 0], torch.zeros(0, 3)],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "arrays": list(ARRAYS),
        "scalars": [np.float64(1.5), np.int64(3), np.bool_(True)],
        "more": collections.OrderedDict(size=torch.Size([1, 2]), dtype=torch.bfloat16, kinds={1, 2}),
    }


def saved(kind):
    if isinstance(kind, int):
        return pickle.dumps(content(), kind)
    buffer = io.BytesIO()
    torch.save(content(), buffer, _use_new_zipfile_serialization=kind == "zip")
    return buffer.getvalue()


KINDS = ("zip", "stream", *range(pickle.HIGHEST_PROTOCOL + 1))


@pytest.mark.parametrize("kind", KINDS)
def test_everything_comes_back_bit_for_bit(kind):
    read, whole = read_restricted(saved(kind)), content()
    for name, tensor in whole["tensors"].items():
        assert read["tensors"][name].dtype is tensor.dtype
        assert torch.equal(read["tensors"][name], tensor)
    for view, tensor in zip(read["views"], whole["views"], strict=True):
        assert torch.equal(view, tensor)
    assert torch.equal(read["parameter"], torch.ones(2))
    for array, expected in zip(read["arrays"], ARRAYS, strict=True):
        assert array.dtype == expected.dtype
        assert array.shape == expected.shape
        assert (array == expected).all()
    assert read["scalars"] == [1.5, 3, True]
    assert read["more"] == {"size": (1, 2), "dtype": torch.bfloat16, "kinds": {1, 2}}


class Opens:
    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("zipped", [True, False])
def test_a_call_in_a_pt_file_is_refused_and_not_made(zipped, tmp_path):
    Opens.path = str(tmp_path / "trace")
    file = tmp_path / "batch.pt"
    torch.save({"tokens": torch.ones(2), "hook": Opens()}, file, _use_new_zipfile_serialization=zipped)
    with pytest.raises(RecordError, match=r"global _?io\.open"):
        read_restricted(file)
    assert not (tmp_path / "trace").exists()


class Sample:
    def __init__(self):
        self.tokens = [1, 2]


def test_a_class_is_refused_by_name_or_read_by_a_constructor(tmp_path):
    file = tmp_path / "samples.pt"
    torch.save([Sample()], file)
    name = f"{__name__}.Sample"
    with pytest.raises(RecordError, match=name.replace(".", r"\.")):
        read_restricted(file)
    assert read_restricted(file, known=Known(states={name: lambda _, state: state})) == [{"tokens": [1, 2]}]


def test_numpy_types_with_fields_are_refused():
    """Their state could lay numbers over pointers to objects."""
    with pytest.raises(RecordError, match="without fields"):
        read_restricted(pickle.dumps(np.zeros(2, dtype=[("a", "i4"), ("b", "O")])))


def test_a_view_beyond_its_storage_is_damage(tmp_path):
    file, changed = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save(torch.arange(4.0), file)
    with zipfile.ZipFile(file) as before, zipfile.ZipFile(changed, "w") as after:
        for entry in before.namelist():
            content = before.read(entry)
            after.writestr(entry, content[:8] if entry.endswith("data/0") else content)
    with pytest.raises(RecordError, match="out of bounds"):
        read_restricted(changed)


@pytest.mark.parametrize("kind", ["zip", "stream", 4])
def test_damage_is_an_error_in_four_parts_and_nothing_else(kind):
    whole, refused, tried = saved(kind), 0, 0
    for at in range(0, len(whole), max(1, len(whole) // 150)):
        for content in (whole[:at], whole[:at] + bytes([whole[at] ^ 0x2A]) + whole[at + 1 :]):
            tried += 1
            try:
                read_restricted(content)
            except RecordError as error:
                refused += all(error.parts.values())
    assert refused >= tried / 2  # every cut


def test_a_storage_of_another_length_than_in_the_object_is_damage():
    """Each of the eight bytes of its count, the one that overflows a size among them, and a last byte that lacks."""
    file = io.BytesIO()
    torch.save(torch.ones(2), file, _use_new_zipfile_serialization=False)
    whole = file.getvalue()
    count = len(whole) - 2 * 4 - 8
    assert int.from_bytes(whole[count : count + 8], "little") == 2
    for content in [whole[:-1]] + [whole[:at] + b"\x2a" + whole[at + 1 :] for at in range(count, count + 8)]:
        with pytest.raises(RecordError, match="bytes of a storage"):
            read_restricted(content)


def test_no_file_and_no_path():
    with pytest.raises(RecordError, match="No such file"):
        read_restricted("nowhere.pt")
    with pytest.raises(SpecError, match="a int"):
        read_restricted(3)
