"""Columns of a batch: documents, or a padded rectangle of prompts and completions, end to end.

Letters: T packed tokens | B documents | P and C, the padded lengths of prompts and completions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workbench.errors import ShapeError
from workbench.shapes import check_shapes

if TYPE_CHECKING:
    from workbench.rollouts.batch import RolloutBatch

_REALS = ("advantages", "old_logprobs", "sampler_logprobs", "ref_logprobs")
_DOCUMENT_KEYS = ("tokens", "loss_mask", *_REALS, "reward", "group_id")
"""Keys of a document; the first four are required."""


def columns_of_documents(where: str, documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields of `RolloutBatch.from_documents`; ``where`` begins its errors."""
    if not documents:
        raise ShapeError(
            f"{where} of no documents",
            rule="at least one document",
            fix="check the file or the filter that produced this list",
        )
    given = [{key: value for key, value in document.items() if value is not None} for document in documents]
    for index, document in enumerate(given):
        if set(document) != set(given[0]) or not set(document) <= set(_DOCUMENT_KEYS):
            raise ShapeError(
                f"{where}: document {index} has other keys",
                found=f"{sorted(document)}, and {sorted(given[0])} in document 0",
                rule=f"every document has the same keys, from {sorted(_DOCUMENT_KEYS)}",
                fix="give the missing values, or leave the key out everywhere",
            )
    _refuse_absent(where, given[0], _DOCUMENT_KEYS[:4])
    columns: dict[str, list[Tensor]] = {key: [] for key in given[0]}
    for index, document in enumerate(given):
        labels = {key: f"{where}: document {index}, {key}" for key in document}
        values = {key: as_tensor(labels[key], value) for key, value in document.items()}
        length = values["tokens"].numel()
        if length == 0:
            raise ShapeError(
                labels["tokens"], found="no token", rule="a document has a token", fix="leave such documents out"
            )
        if values["advantages"].dim() == 0:
            values["advantages"] = values["advantages"].expand(length)
        for key, value in values.items():
            if value.shape != (() if key in ("reward", "group_id") else (length,)):
                raise ShapeError(
                    labels[key],
                    found=f"shape {list(value.shape)} for {length} tokens",
                    rule="one value per token of the document, prompt included; one reward, one group_id",
                    fix="pad the prompt's part with zeros, or use from_padded",
                )
            columns[key].append(_CONVERTERS.get(key, _as_reals)(labels[key], value))

    def column(key: str) -> Tensor | None:
        return torch.cat([values.reshape(-1) for values in columns[key]]) if key in columns else None

    return _places([len(values) for values in columns["tokens"]]) | {
        **{f"{key}_T": column(key) for key in ("tokens", "loss_mask", *_REALS)},
        "group_ids_N": column("group_id"),
        "rewards_N": column("reward"),
    }


def _refuse_negative(where: str, name: str, ids: Tensor, mask_name: str, mask: Tensor) -> None:
    """Raise if a token id under the mask is negative, such as the -100 of ignored labels."""
    bad = mask & (ids < 0)
    if bad.any():
        row, at = (int(i) for i in torch.nonzero(bad)[0])
        raise ShapeError(
            f"{where}: {name}, row {row}, token {at}",
            found=f"{ids[row, at].item()}; {int(bad.sum())} negative ids in all where {mask_name} is 1",
            rule="a token id is at least 0; -100 marks labels that a loss ignores, not tokens",
            fix=f"pass the ids that the policy sampled, and set {mask_name} to 0 on padding",
        )


def columns_of_padded(where: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `RolloutBatch.from_padded`, of its arguments by name; ``where`` begins its errors."""
    arrays = {name: as_tensor(f"{where}: {name}", value) for name, value in given.items() if value is not None}
    _refuse_absent(where, arrays, list(given)[:6])
    shapes = dict.fromkeys(given, "BC") | {"prompt_ids": "BP", "prompt_mask": "BP", "rewards": "B", "group_ids": "B"}
    if arrays["advantages"].dim() == 1:
        shapes["advantages"] = "B"
    check_shapes(where, **{f"{name}_{shapes[name]}": value for name, value in arrays.items()})
    if not len(arrays["completion_ids"]):
        raise ShapeError(where, found="no rows", rule="at least one document", fix="pass the documents of a step")
    masks = {
        name: _as_mask(f"{where}: {name}", arrays[name])
        for name in ("prompt_mask", "completion_mask", "loss_mask")
        if name in arrays
    }
    prompt_BP, completion_BC = masks["prompt_mask"], masks["completion_mask"]
    trained_BC = masks.get("loss_mask", completion_BC)
    _refuse_padded(where, prompt_BP, completion_BC, trained_BC)
    for name, mask in (("prompt", prompt_BP), ("completion", completion_BC)):
        _refuse_negative(where, f"{name}_ids", arrays[f"{name}_ids"], f"{name}_mask", mask)

    real = torch.cat([prompt_BP, completion_BC], dim=1)
    trained = torch.cat([torch.zeros_like(prompt_BP), trained_BC], dim=1)

    def column(name: str) -> Tensor | None:
        if name not in arrays:
            return None
        value = _as_reals(f"{where}: {name}", arrays[name])
        value = (value if value.dim() == 2 else value[:, None]).expand(trained_BC.shape)
        bad = trained_BC & ~torch.isfinite(value)
        if bad.any():
            row, at = (int(i) for i in torch.nonzero(bad)[0])
            raise ShapeError(
                f"{where}: {name}, row {row}, completion token {at}",
                found=f"{float(value[row, at])}; {int(bad.sum())} such values in all",
                rule="every token that trains has a finite value",
                fix="set loss_mask to 0 on such tokens, or find out why they have none",
            )
        value = torch.where(torch.isfinite(value), value, 0.0)
        return torch.cat([value.new_zeros(prompt_BP.shape), value], dim=1)[real]

    ids = {
        name: _as_ids(f"{where}: {name}", arrays[name])
        for name in ("prompt_ids", "completion_ids", "group_ids")
        if name in arrays
    }
    return _places(real.sum(dim=1).tolist()) | {
        "tokens_T": torch.cat([ids["prompt_ids"], ids["completion_ids"]], dim=1)[real],
        "loss_mask_T": trained[real],
        **{f"{name}_T": column(name) for name in _REALS},
        "group_ids_N": ids.get("group_ids"),
        "rewards_N": _as_reals(f"{where}: rewards", arrays["rewards"]) if "rewards" in arrays else None,
    }


def _places(lengths: list[int]) -> dict[str, Any]:
    """Positions and document ids of documents of these lengths."""
    return {
        "positions_T": torch.cat([torch.arange(length) for length in lengths]),
        "document_ids_T": torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
    }


def as_tensor(what: str, value: Any) -> Tensor:
    """Convert a tensor, a numpy array or nested lists to a tensor on the CPU; errors begin with ``what``."""
    try:
        tensor = torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ShapeError(
            what,
            found=str(error),
            rule="a rectangle of numbers",
            fix="pad the rows to one length; a mask marks the tokens",
        ) from None
    if tensor.is_complex():
        raise ShapeError(what, found=f"dtype {tensor.dtype}", rule="real numbers", fix="pass real numbers")
    if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64):  # torch compares none of these
        signed = tensor.to(torch.int64)
        if (signed < 0).any():
            raise ShapeError(what, found="a number of 2^63 or more", rule="numbers of 64 bits", fix="check the numbers")
        return signed
    return tensor


def _as_ids(what: str, value: Tensor) -> Tensor:
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise ShapeError(what, found=f"dtype {value.dtype}", rule="whole numbers", fix="pass the ids as integers")
    return value.to(torch.int64)


def _as_mask(what: str, value: Tensor) -> Tensor:
    if not ((value == 0) | (value == 1)).all():
        raise ShapeError(
            what,
            found=f"from {float(value.min())} to {float(value.max())}",
            rule="a mask has only 0 and 1",
            fix="put weights into advantages or an extension",
        )
    return value.bool()


def _as_reals(what: str, value: Tensor) -> Tensor:
    if value.is_complex() or value.dtype == torch.bool:
        raise ShapeError(what, found=f"dtype {value.dtype}", rule="real numbers", fix="pass floating-point values")
    return value if value.dtype == torch.float64 else value.to(torch.float32)


_CONVERTERS = {"tokens": _as_ids, "group_id": _as_ids, "loss_mask": _as_mask}
"""Conversions of a document's values; all others are real numbers."""


def _refuse_absent(where: str, given: Mapping[str, Any], required: Sequence[str]) -> None:
    if missing := [name for name in required if name not in given]:
        raise ShapeError(
            where,
            found=f"no {', '.join(missing)}",
            rule=f"{', '.join(required)} are required",
            fix="old_logprobs may be the sampler's if the two are known to be equal",
        )


def _refuse_padded(where: str, prompt_BP: Tensor, completion_BC: Tensor, trained_BC: Tensor) -> None:
    """Refuse masks that do not determine a document; name the rows."""
    rules = (
        (
            prompt_BP[:, :-1] & ~prompt_BP[:, 1:],
            "prompt_mask is 0 after a 1",
            "prompts are padded on the left, without holes",
            "shift each prompt to the right end of its row",
        ),
        (
            completion_BC[:, 1:] & ~completion_BC[:, :-1],
            "completion_mask is 1 after a 0",
            "completions are padded on the right, without holes",
            "pass the holes as loss_mask: a hole in completion_mask would drop the token from the context of "
            "those after it; in loss_mask it stays and is only not trained",
        ),
        (
            trained_BC & ~completion_BC,
            "loss_mask is 1 where completion_mask is 0",
            "only tokens train",
            "multiply loss_mask by completion_mask",
        ),
        (
            ~(prompt_BP.any(dim=1) | completion_BC.any(dim=1))[:, None],
            "the row has no token at all",
            "every row is a document",
            "leave such rows out",
        ),
        (
            trained_BC[:, :1] & ~prompt_BP.any(dim=1, keepdim=True),
            "the first completion token trains and there is no prompt",
            "a token is predicted from one before it",
            "give the prompt (a start token at least), or set loss_mask to 0 on that token",
        ),
    )
    for broken, found, rule, fix in rules:
        if rows := torch.nonzero(broken.any(dim=1)).squeeze(1).tolist():
            more = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
            raise ShapeError(f"{where}: row {', '.join(map(str, rows[:5]))}{more}", found=found, rule=rule, fix=fix)


def broken_shapes(batch: RolloutBatch) -> list[str]:
    """Defects that prevent the checks of values: a tensor that is missing, or of another shape or dtype."""
    known = {f.name: f for f in fields(batch)}
    own = {name: (f.metadata["level"], getattr(batch, name)) for name, f in known.items() if "level" in f.metadata}
    own = {name: entry for name, entry in own.items() if entry[1] is not None or known[name].default is MISSING}
    extensions = {f"extension {name}": (e.level, e.values) for name, e in batch.extensions.items()}
    broken = [f"extension {name} has the name of a field" for name in batch.extensions if name in known]
    broken += [
        f"{name} has level {level!r}, not token or document"
        for name, (level, _) in extensions.items()
        if level not in ("token", "document")
    ]
    broken += [
        f"{name} is {'None' if value is None else f'a {type(value).__name__}'}, not a tensor"
        for name, (_, value) in (own | extensions).items()
        if not isinstance(value, Tensor)
    ]
    if broken:
        return broken
    for name, (_, value) in own.items():
        kind = known[name].metadata["dtype"]
        if not (value.is_floating_point() if kind == "float" else value.dtype == getattr(torch, kind)):
            broken.append(f"{name} has dtype {value.dtype}, not {kind}")
    wide = {f"extension {name}" for name, e in batch.extensions.items() if e.level == "token"}
    for level in ("token", "document"):
        if not broken:  # documents can be counted only in token fields that fit
            expected = batch.tokens_T.numel() if level == "token" else batch.num_documents
            broken += [
                f"{name} has shape {tuple(value.shape)}, not [{expected}]"
                for name, (at, value) in (own | extensions).items()
                if at == level and (value.shape[:1] if name in wide else value.shape) != (expected,)
            ]
    return broken
