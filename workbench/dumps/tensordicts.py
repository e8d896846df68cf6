"""Constructors of the containers in which trainers keep a batch: `TensorDict`, `DataProto` and `TrainingInputBatch`.

They give the restricted reader (`workbench.rollouts.torch_files`) the contents as plain dicts of tensors; the packages
themselves are not imported. Read from tensordict 0.15.3, verl 0.9.1 and SkyRL 0.3.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from workbench.errors import RecordError
from workbench.rollouts.pickles import Global, Known
from workbench.rollouts.torch_files import read_restricted


class DataProto(NamedTuple):
    """Contents of a `verl.DataProto`.

    Attributes:
        batch: tensors by name.
        non_tensors: numpy arrays by name.
        meta: other data.
    """

    batch: dict[str, Tensor]
    non_tensors: dict[str, Any]
    meta: dict[str, Any]


def _consolidated(metadata: dict[str, Any], storage: Tensor) -> dict[str, Any]:
    """Tensors of a consolidated TensorDict: slices of one tensor of bytes."""
    tensors: dict[str, Any] = {}
    for name, (dtype, shape, start, stop, pad, *_) in metadata["leaves"].items():
        if name.startswith("<NJT"):
            raise RecordError(
                f"read the value {name.partition('>')[2]} of a TensorDict",
                found="a nested tensor",
                rule="rectangles of padded values",
                fix="call to_padded_tensor() before saving",
            )
        number = int(np.prod(shape))
        values = storage[start:stop].clone().view(_dtype(dtype))
        tensors[name] = (values[:number] if pad else values).reshape(tuple(shape))
    return tensors


def _dtype(name: Any) -> torch.dtype:
    """Type of a tensor, from its name ("torch.float32" or "float32")."""
    dtype = name if isinstance(name, torch.dtype) else getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no type of tensors {name!r}")
    return dtype


def _serialized(batch: Any) -> dict[str, Tensor]:
    """Tensors of `serialize_tensordict`: (batch size, device, name -> (type, shape, bytes))."""
    _, _, values = batch
    tensors = {}
    for name, (dtype, shape, content) in values.items():
        if dtype == "nested" or isinstance(dtype, tuple) or isinstance(shape, list):
            raise ValueError(f"{name} is a nested tensor; call to_padded_tensor() before saving")
        flat = torch.from_numpy(np.ascontiguousarray(content)).view(_dtype(dtype))
        tensors[name] = flat.reshape(tuple(shape))
    return tensors


def _data_proto(_: tuple[Any, ...], state: Any) -> DataProto:
    batch, non_tensors, meta = state
    if isinstance(batch, bytes):
        batch = read_restricted(batch, known=KNOWN, what="the batch of a DataProto")
    elif isinstance(batch, tuple):
        batch = _serialized(batch)
    return DataProto(dict(batch or {}), dict(non_tensors), dict(meta))


KNOWN = Known(
    calls={
        "tensordict._reductions._rebuild_tensordict_files_consolidated": _consolidated,
        "tensordict._reductions._make_td": lambda _, state: dict(state["_tensordict"]),
    },
    states={
        "tensordict._td.TensorDict": lambda _, state: dict(state["_tensordict"]),
        "verl.protocol.DataProto": _data_proto,
    },
)
"""`TensorDict` and `verl.DataProto`."""


class TrainingInputBatch(NamedTuple):
    """Contents of SkyRL's `TrainingInputBatch`.

    Attributes:
        tensors: by name; None where SkyRL has None.
        metadata: other data.
    """

    tensors: dict[str, Any]
    metadata: dict[str, Any]


def _training_input(_: Any, state: Mapping[str, Any]) -> TrainingInputBatch:
    return TrainingInputBatch(
        {name: _skyrl_tensor(value) for name, value in state["batch_dict"].items()}, dict(state["metadata"] or {})
    )


def _skyrl_tensor(value: Any) -> Any:
    """Tensor of `_serialize_tensor`; lists of tensors are those of images, and are not read."""
    if value is None or value.get("format") == "tensor_list":
        return None
    if value.get("format") == "torch":
        return read_restricted(value["data"], what="a tensor of a TrainingInputBatch")
    array = np.frombuffer(value["data"], dtype=np.dtype(str(value["dtype"])))
    return torch.from_numpy(array.reshape(tuple(value["shape"])).copy())


_SKYRL_MODULE = "skyrl.backends.skyrl_train.training_batch"
SKYRL = Known(
    constants={f"{_SKYRL_MODULE}.TrainingInputBatch": Global(f"{_SKYRL_MODULE}.TrainingInputBatch")},
    calls={f"{_SKYRL_MODULE}._rebuild_tensor_batch": _training_input},
)
"""`TrainingInputBatch` of SkyRL."""
