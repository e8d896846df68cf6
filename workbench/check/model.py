"""A step passed through its checkpoint: token log-probabilities, and the gradient of its loss, in any layout.

The gradient is that of `sum_t c_t logp_t + e_t H_t`, with `c` and `e` the derivatives of the step's loss by the
log-probability and the entropy of each token: by the chain rule that of the loss, whatever it is and however it is
divided. The pass is a step of `workbench.train`, whose layouts, in float64, agree within 1e-12 of each parameter.

Letters: T tokens of the dump | S tokens of prompts and completions that are passed through the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from workbench.dumps.step import StepDump
from workbench.errors import RecordError, SpecError, check_kind, listed
from workbench.losses.terms import LossInputs, Term
from workbench.policy.decoder import decoder_config
from workbench.reduction.weights import StepTotals
from workbench.rollouts.batch import RolloutBatch
from workbench.sharding.mesh import Mesh, single_process_mesh
from workbench.sharding.simulated import simulate
from workbench.specs.groups import LayoutSpec, ModelSpec
from workbench.specs.losses import LossSpec
from workbench.specs.reading import parse_spec
from workbench.specs.run import RunSpec
from workbench.train.checkpoint import build_policy
from workbench.train.rows import LocalRow
from workbench.train.step import prepare_rows, run_step

Precision = Literal["float64", "float32", "bfloat16"]
TIMEOUT_S = 3600.0
"""Of a collective between simulated ranks, which wait while others compute; a convention."""


@dataclass(frozen=True)
class Passed:
    """Results of one pass of a step through its model.

    Attributes:
        logprobs_T: [T] nats, of the tokens that train; 0 elsewhere.
        gradients: whole gradient of each parameter.
        norms: its L2 norm.
    """

    logprobs_T: Tensor
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    norms: Mapping[str, float] = field(default_factory=dict)

    @property
    def norm(self) -> float:
        """L2 norm of the whole gradient."""
        return math.sqrt(sum(value**2 for value in self.norms.values()))


@dataclass(frozen=True)
class ModelStep:
    """The documents of a step as rows of a model.

    Attributes:
        model: checkpoint folder, or the name of a tiny model.
        layout: ranks, which are simulated on this machine's CPU.
        batch: documents that train, with their prompts.
        place_S: [S] place of each token in the dump; -1 on prompts.
        num_tokens: T.
    """

    model: str
    layout: LayoutSpec
    batch: RolloutBatch
    place_S: Tensor
    num_tokens: int

    def take(
        self,
        precision: Precision = "float64",
        *,
        coefficients_T: Tensor | None = None,
        of_entropies_T: Tensor | None = None,
        layout: LayoutSpec | None = None,
    ) -> Passed:
        """Pass the step through the model.

        Args:
            precision: of weights, activations and gradients; a preset of `workbench.specs.precision`.
            coefficients_T: [T] derivative of the loss by log-probabilities; None: 0.
            of_entropies_T: [T] by entropies; None: 0.
            layout: None: that of this object.
        """
        layout = self.layout if layout is None else layout
        spec, num_source = self._spec(precision, layout), self.batch.num_tokens
        given = {"logprob": coefficients_T, "entropy": of_entropies_T}
        by_name = {name: self._of_source(value_T) for name, value_T in given.items() if value_T is not None}

        def loss(inputs: LossInputs) -> dict[str, Term]:
            assert inputs.source_T is not None, "of rows of a step"
            assert inputs.entropy_T is not None, "among the head outputs of every loss"
            at_T, policy_T = inputs.source_T.clamp_min(0), inputs.policy_logprobs_T
            terms = {"policy": Term(0.0 * policy_T)}
            for name, values_T in (("logprob", policy_T), ("entropy", inputs.entropy_T)):
                if name in by_name:
                    terms[name] = Term(by_name[name].to(values_T)[at_T] * values_T, weight="raw")
            return terms

        def rank(mesh: Mesh) -> Any:
            policy = build_policy(spec, mesh, Path(), temperature=self.batch.temperature)
            rows, totals = prepare_rows(self.batch, spec, mesh)
            return run_step(
                policy, loss, rows, totals, num_source=num_source, keep_gradients=bool(by_name), level="none"
            )

        sizes: dict[str, Any] = layout.mesh_sizes
        result = simulate(rank, **sizes, timeout_s=TIMEOUT_S)[0]
        logprobs_T = self._of_dump(result.tokens["policy_logprobs"])
        if not by_name:
            return Passed(logprobs_T)
        return Passed(logprobs_T, {n: g.cpu().double() for n, g in result.gradients.items()}, result.norms)

    def head(self) -> Head:
        """Return the model's head over one float64 forward pass of one rank, for other temperatures."""
        spec, mesh = self._spec("float64", LayoutSpec()), single_process_mesh()
        policy = build_policy(spec, mesh, Path(), temperature=self.batch.temperature)
        rows, totals = prepare_rows(self.batch, spec, mesh)
        with torch.no_grad():
            return Head(self, policy, rows, [row.hidden_states(policy) for row in rows], totals)

    def _spec(self, precision: Precision, layout: LayoutSpec) -> RunSpec:
        # a mean over several micro-batches of a pipeline needs as many rows as stages are filled
        rows = {"micro_batches": layout.pp} if layout.pp > 1 else {}
        return parse_spec(
            RunSpec,
            {
                "model": ModelSpec(source=self.model).model_dump(),
                "layout": layout.model_dump(),
                "data": rows,
                "loss": LossSpec(name="ppo", denominator="raw").model_dump(),
                "precision": precision,
                "device": "cpu",
            },
            where="the pass of a step through its model",
        )

    def _of_source(self, value_T: Tensor) -> Tensor:
        return torch.where(self.place_S >= 0, value_T.double()[self.place_S.clamp_min(0)], 0.0)

    def _of_dump(self, value_S: Tensor) -> Tensor:
        value_T = torch.zeros(self.num_tokens, dtype=torch.float64)
        trains_S = self.batch.loss_mask_T
        value_T[self.place_S[trains_S]] = value_S.double()[trains_S]
        return value_T


@dataclass(frozen=True)
class Head:
    """Hidden states of a step, on which the head is applied at other temperatures."""

    step: ModelStep
    policy: Any
    rows: Sequence[LocalRow]
    hidden: Sequence[Tensor]
    totals: StepTotals

    def logprobs(self, temperature: float, most: int | None = None) -> Tensor:
        """[T] log-probabilities of the tokens that train, of the first ``most`` of a row; NaN elsewhere."""
        value_T = torch.full((self.step.num_tokens,), math.nan, dtype=torch.float64)
        self.policy.temperature = temperature
        for local, hidden_TD in zip(self.rows, self.hidden, strict=True):
            active_T = local.row.loss_mask_T
            if most is not None:
                active_T = active_T & (active_T.cumsum(0) <= most)
            with torch.no_grad():
                logprobs_T = local.token_logprobs(self.policy, hidden_TD, (), active_T).logprobs_T
            value_T[self.step.place_S[local.row.source_T[active_T]]] = logprobs_T.double()[active_T]
        return value_T


def model_step(dump: StepDump, model: Path | str, layout: Mapping[str, Any] | None = None) -> ModelStep:
    """Return the documents of a step that train, with their prompts, for a checkpoint.

    Tokens after the last one that trains are left out: a causal model's earlier ones do not depend on them.

    Raises:
        SpecError: no such checkpoint, a layout that is none; ids beyond the vocabulary, or documents longer than the
            model's positions.
        RecordError: the dump has no token ids, or no prompts.
    """
    check_kind("recompute a step", model, (str, Path), "pass a checkpoint folder, or the name of a tiny model")
    requested = f"recompute {dump.origin} with the model {model}"
    spec: LayoutSpec = parse_spec(LayoutSpec, dict(layout or {}), where="layout")
    absent = [name for name in ("token_ids",) if name not in dump.tokens]
    absent += [name for name in ("prompt_ids",) if name not in dump.ids]
    if absent:
        raise RecordError(
            requested,
            found=f"a dump without {' and '.join(absent)}",
            rule="a log-probability is computed from the ids of the tokens and of the prompt before them",
            fix="dump them (docs/guides/check-a-step.md#the-interchange-format), or check the step without a model",
        )
    documents, places = [], []
    mask_T, ids_T = dump.loss_mask_T, dump.tokens["token_ids"]
    kept_T = dump.tokens.get("token_mask", torch.ones_like(mask_T))
    if ids_T.is_floating_point():
        raise RecordError(requested, found=f"token_ids of {ids_T.dtype}", rule="vocabulary ids are whole numbers")
    lengths = torch.bincount(dump.document_ids_T, minlength=dump.num_documents).tolist()
    for number, at_T in enumerate(torch.arange(len(mask_T)).split(lengths)):
        trained = torch.nonzero(mask_T[at_T]).squeeze(1)
        if not len(trained):
            continue
        own_T = at_T[: int(trained[-1]) + 1]
        own_T = own_T[kept_T[own_T]]
        prompt = dump.ids["prompt_ids"][number]
        if not len(prompt) and bool(mask_T[own_T[0]]):
            raise RecordError(
                requested,
                found=f"no prompt of document {number}, whose first token trains",
                rule="nothing predicts the first token of a sequence",
                fix="dump the prompt_ids of the document, or mask its first token",
            )
        tokens = torch.cat([prompt, ids_T[own_T]])
        zeros = torch.zeros(len(tokens), dtype=torch.float64)
        mask = torch.cat([torch.zeros(len(prompt), dtype=torch.bool), mask_T[own_T]])
        documents.append(
            {"tokens": tokens, "loss_mask": mask.long(), "advantages": zeros, "old_logprobs": zeros, "group_id": 0}
        )
        places.append(torch.cat([torch.full((len(prompt),), -1), own_T]))
    if not documents:
        raise RecordError(requested, found="no token that trains", rule="a step has one at least")
    batch = RolloutBatch.from_documents(documents, temperature=dump.temperature)
    place_S = torch.cat(places)
    _check_ids(requested, dump, str(model), batch, place_S)
    return ModelStep(str(model), spec, batch, place_S, len(mask_T))


def _check_ids(requested: str, dump: StepDump, model: str, batch: RolloutBatch, place_S: Tensor) -> None:
    config = decoder_config(model)
    ids_S, size = batch.tokens_T, int(config.vocab_size)
    if bad := torch.nonzero((ids_S < 0) | (ids_S >= size)).squeeze(1).tolist():
        place = int(place_S[bad[0]])
        of = dump.place(place) if place >= 0 else "a prompt"
        raise SpecError(
            requested,
            found=f"{len(bad)} token ids beyond the vocabulary, first {int(ids_S[bad[0]])}, of {of}",
            rule=f"ids of the checkpoint's own vocabulary, 0 to {size - 1}",
            fix="give the checkpoint with whose tokenizer the step was made",
        )
    limit = getattr(config, "max_position_embeddings", None)
    longest = int(batch.positions_T.max()) + 1
    if limit is not None and longest > limit:
        raise SpecError(
            requested,
            found=f"a document of {longest} tokens, and {limit} positions",
            rule="documents that the model can read",
            fix="give the checkpoint of the step",
        )


def check_gradients(requested: str, recorded: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise if a recorded gradient is of no parameter of the model, or has another shape.

    Raises:
        SpecError: with the names.
    """
    if unknown := sorted(set(recorded) - set(expected)):
        raise SpecError(
            requested,
            found=f"a gradient of {listed(unknown, 3)}",
            rule=f"gradients have the names of the checkpoint's parameters: {listed(sorted(expected), 3)}",
            fix="write them under the names of the saved checkpoint, without a wrapper's prefix",
        )
    for name, value in recorded.items():
        if value.shape != expected[name].shape:
            raise SpecError(
                requested,
                found=f"a gradient of {name} of shape {list(value.shape)}",
                rule=f"{list(expected[name].shape)}, the whole parameter",
                fix="gather the shards of all ranks before the gradient is written",
            )
