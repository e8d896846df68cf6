"""One optimizer step of a trainer as data: what it was given, and what it recorded of the result.

Values are aligned with their token: `old_logprobs[t]` is the log-probability of token t. Recorded results are those
whose gradient reaches the optimizer, after an engine's averaging.

Letters: T tokens of completions, of all documents | N documents | B rows | C padded length of completions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from workbench.errors import RecordError, did_you_mean, listed

LOGPROBS = ("policy_logprobs", "old_logprobs", "sampler_logprobs", "ref_logprobs")
TOKEN_FIELDS: Mapping[str, str] = {
    "loss_mask": "1 on tokens that train; required",
    "token_mask": "1 on tokens of completions, trained or not; 0 on padding",
    "token_ids": "vocabulary ids",
    "policy_logprobs": "nats, of the policy that the loss is of",
    "old_logprobs": "nats, of the policy at the start of the update",
    "sampler_logprobs": "nats, as the sampler reported them",
    "ref_logprobs": "nats, of the frozen reference",
    "entropies": "nats, of the policy's distribution",
    "token_rewards": "reward units, earned at the token",
    "values": "reward units, a critic's value of the state before the token",
    "advantages": "reward units, as the loss took them",
    "loss_weights": "recorded: factor of the token's value in the loss",
    "ratios": "recorded: policy / old, before a clip",
    "correction_weights": "recorded: factor of the policy term, for the mismatch of sampler and trainer",
    "clipped": "recorded: 1 where the clip ended the gradient",
    "coefficients": "recorded: derivative of the loss by the token's log-probability",
}
"""Name of a value of each token -> its unit and meaning."""
DOCUMENT_FIELDS: Mapping[str, str] = {
    "rewards": "reward units",
    "group_ids": "prompt of the document, a whole number",
    "advantages": "reward units, one for the whole document",
    "rows": "micro-batch of the document, counted over ranks: rank * micro_batches + number of the micro-batch",
}
"""Name of a value of each document -> its unit and meaning."""
ID_FIELDS: Mapping[str, str] = {
    "prompt_ids": "vocabulary ids of the prompt, before the document's first token",
    "sampler_ids": "vocabulary ids of the completion that the engine drew, where the trainer encoded its text again",
}
"""Name of token ids of each document, of any number -> their meaning."""
MASKS = ("loss_mask", "token_mask", "clipped")
WHOLE_NUMBERS = ("token_ids", "group_ids", "rows")


@dataclass(frozen=True)
class StepDump:
    """One optimizer step: all documents of all ranks and micro-batches.

    Attributes:
        document_ids_T: [T] 0..N-1, in order.
        tokens: values of tokens, [T] each, by the names of `TOKEN_FIELDS`; float64, int64 or bool.
        documents: values of documents, [N] each, by the names of `DOCUMENT_FIELDS`.
        ids: token ids of documents, N tensors [n] each, by the names of `ID_FIELDS`.
        texts: of the completions as the engine returned them, N; (): not recorded.
        gradients: recorded: gradient of the step's loss by the parameter's name in the checkpoint, before a clip.
        gradient_norm: recorded: L2 norm of the whole gradient, before a clip; None: not recorded.
        system: a system of `workbench.systems`, or "" if the settings are those of a `LossSpec`.
        settings: of the loss, by the system's names.
        advantages: settings of the advantage estimator, by the system's names; {}: not known.
        layout: sizes "dp", "cp" and "micro_batches" (of a rank).
        losses: recorded "total", and terms such as "policy" and "kl" with their coefficients.
        counts: recorded "tokens" or "documents" by which the loss was divided.
        metrics: recorded numbers by the system's names.
        dtype: precision in which the trainer computed: float64, float32 or bfloat16.
        temperature: divisor of the logits when the tokens were sampled.
        on_policy: True if the loss was computed on the old policy itself, before any update.
        origin: the file, for messages.
        notes: what the reader assumed or left out.
    """

    document_ids_T: Tensor
    tokens: Mapping[str, Tensor]
    documents: Mapping[str, Tensor] = field(default_factory=dict)
    ids: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    gradient_norm: float | None = None
    texts: Sequence[str] = ()
    system: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    advantages: Mapping[str, Any] = field(default_factory=dict)
    layout: Mapping[str, int] = field(default_factory=dict)
    losses: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    dtype: str = "float32"
    temperature: float = 1.0
    on_policy: bool = False
    origin: str = "a step"
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if broken := broken_rules(self):
            raise RecordError(
                f"read the step of {self.origin}",
                found=listed(broken, 12, separator="\n  "),
                rule="docs/guides/check-a-step.md lists the names, shapes and units",
                fix="correct the writer",
            )

    @classmethod
    def from_rectangle(
        cls, tokens: Mapping[str, Tensor], documents: Mapping[str, Tensor] | None = None, **more: Any
    ) -> StepDump:
        """Build a step of padded values, [B, C] each, one document a row; values of documents are [B].

        Raises:
            RecordError: shapes that disagree, or a broken rule.
        """
        shapes = {tuple(value.shape) for value in tokens.values()}
        if len(shapes) != 1 or len(next(iter(shapes))) != 2:
            raise RecordError(
                f"read the step of {more.get('origin', 'a step')}",
                found=", ".join(f"{name} {list(value.shape)}" for name, value in tokens.items()) or "no values",
                rule="every value of tokens is [B, C], one document a row",
                fix="cut or pad them to the completions, prompts left out",
            )
        rows, width = next(iter(shapes))
        ids_T = torch.arange(rows).repeat_interleave(width)
        return cls(ids_T, {name: value.reshape(-1) for name, value in tokens.items()}, documents or {}, **more)

    @property
    def num_documents(self) -> int:
        """N."""
        return int(self.document_ids_T.max()) + 1 if len(self.document_ids_T) else 0

    @property
    def loss_mask_T(self) -> Tensor:
        """[T] bool: tokens that train."""
        return self.tokens["loss_mask"]

    @property
    def positions_T(self) -> Tensor:
        """[T] index of the token in its completion."""
        lengths_N = torch.bincount(self.document_ids_T, minlength=self.num_documents)
        return torch.arange(len(self.document_ids_T)) - (lengths_N.cumsum(0) - lengths_N)[self.document_ids_T]

    @property
    def advantages_T(self) -> Tensor | None:
        """[T] recorded advantages, of tokens or documents; None if there are none."""
        if "advantages" in self.tokens:
            return self.tokens["advantages"]
        of_documents_N = self.documents.get("advantages")
        return None if of_documents_N is None else of_documents_N[self.document_ids_T]

    def size(self, axis: str) -> int:
        """Return a size of the layout; 1 if it is not known."""
        return int(self.layout.get(axis, 1))

    def place(self, token: int) -> str:
        """Name a token: "document 3, token 7", both from 0."""
        return f"document {int(self.document_ids_T[token])}, token {int(self.positions_T[token])}"

    def with_tokens(self, **changes: Tensor | None) -> StepDump:
        """Return the step with other values of tokens; None removes one."""
        tokens = {name: value for name, value in {**self.tokens, **changes}.items() if value is not None}
        return replace(self, tokens=tokens)

    def reread(
        self, tokens: Mapping[str, Tensor | None] | None = None, documents: Mapping[str, Tensor] | None = None
    ) -> StepDump:
        """Return another reading of a checked step: values replaced, None left out, no rule checked again."""
        other = copy(self)  # without __post_init__
        if tokens is not None:
            object.__setattr__(other, "tokens", {name: value for name, value in tokens.items() if value is not None})
        if documents is not None:
            object.__setattr__(other, "documents", documents)
        return other

    def with_note(self, note: str) -> StepDump:
        """Return the step with a further note."""
        return replace(self, notes=(*self.notes, note))


def broken_rules(dump: StepDump) -> list[str]:
    """Return every broken rule of a step, with names and places."""
    ids_T, broken = dump.document_ids_T, list[str]()
    if not len(ids_T):
        return ["no token"]
    steps_T = ids_T[1:] - ids_T[:-1]
    if int(ids_T[0]) != 0 or not bool(((steps_T == 0) | (steps_T == 1)).all()):
        return [f"documents {listed(ids_T.unique().tolist())}, which are not 0, 1, ... in order"]
    size = {"token": len(ids_T), "document": dump.num_documents}
    for level, fields, known in (
        ("token", dump.tokens, TOKEN_FIELDS),
        ("document", dump.documents, DOCUMENT_FIELDS),
    ):
        for name, value in fields.items():
            if name not in known:
                broken.append(f"unknown value of a {level}: {name} ({did_you_mean(name, known, ', '.join(known))})")
            elif tuple(value.shape) != (size[level],):
                broken.append(f"{name}: shape {list(value.shape)} for {size[level]} {level}s")
            elif name in MASKS and value.dtype is not torch.bool:
                broken.append(f"{name}: dtype {value.dtype}, where a mask is bool")
    for name, by_document in dump.ids.items():
        if name not in ID_FIELDS:
            hint = did_you_mean(name, ID_FIELDS, ", ".join(ID_FIELDS))
            broken.append(f"unknown token ids of a document: {name} ({hint})")
        elif len(by_document) != dump.num_documents:
            broken.append(f"{name}: of {len(by_document)} documents, where the step has {dump.num_documents}")
        else:
            broken += [
                f"{name} of document {number}: {ids.dtype} {list(ids.shape)}, where it is [n] of int64"
                for number, ids in enumerate(by_document)
                if ids.dtype is not torch.int64 or ids.dim() != 1
            ]
    if "loss_mask" not in dump.tokens:
        broken.append("no loss_mask")
    return broken or _broken_values(dump)


def _broken_values(dump: StepDump) -> list[str]:
    broken, mask_T = list[str](), dump.loss_mask_T
    for name, value in dump.tokens.items():
        if not value.is_floating_point():
            continue
        if bad := torch.nonzero(mask_T & ~value.isfinite()).squeeze(1).tolist():
            broken.append(f"{name}: {float(value[bad[0]])} at {dump.place(bad[0])}, which trains")
        elif name in LOGPROBS and (bad := torch.nonzero(mask_T & (value > 1e-4)).squeeze(1).tolist()):
            broken.append(f"{name}: {float(value[bad[0]]):.4g}, above 0, at {dump.place(bad[0])}")
    for name, value in dump.documents.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            broken.append(f"{name}: not finite in document {int(torch.nonzero(~value.isfinite())[0])}")
    if "token_mask" in dump.tokens and (bad := torch.nonzero(mask_T & ~dump.tokens["token_mask"]).squeeze(1).tolist()):
        broken.append(f"loss_mask: {len(bad)} tokens train that are padding, first {dump.place(bad[0])}")
    if dump.texts and len(dump.texts) != dump.num_documents:
        broken.append(f"texts: of {len(dump.texts)} documents, where the step has {dump.num_documents}")
    for name, value in dump.gradients.items():
        if not bool(value.isfinite().all()):
            broken.append(f"gradient of {name}: not finite")
    if dump.gradient_norm is not None and not 0 <= dump.gradient_norm < float("inf"):
        broken.append(f"gradient_norm = {dump.gradient_norm}, where it is a finite number, at least 0")
    rows = dump.documents.get("rows")
    passes = dump.size("dp") * dump.size("micro_batches")
    if rows is not None and not (int(rows.min()) >= 0 and int(rows.max()) < passes):
        broken.append(f"rows: {int(rows.min())} to {int(rows.max())}, of dp * micro_batches = {passes}")
    if rows is None and passes > 1:
        broken.append(f"no rows, with dp * micro_batches = {passes}: which document is in which micro-batch")
    return broken


def as_value(name: str, value: Tensor) -> Tensor:
    """Convert a value to the dtype of its kind: bool, int64 or float64."""
    value = value.detach().cpu()
    if name in MASKS:
        return value.bool() if value.dtype is torch.bool or bool(((value == 0) | (value == 1)).all()) else value
    return value.long() if name in WHOLE_NUMBERS and not value.is_floating_point() else value.double()
