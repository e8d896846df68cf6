"""One trial of an engine as data: what it is given, and what it shows from outside.

With `sgd` and a learning rate of 1, without momentum, weight decay and clip, the weights before a step minus those
after it are the gradient that the engine applied, whatever its layout, its buffers and its hooks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from workbench.atomic import read_json, read_tensors, to_json, write_tensors, write_whole
from workbench.errors import RecordError

PAD, END, VOCABULARY = 0, 1, 32
"""Token ids that documents leave out, and the size of the vocabulary that models of drivers have."""

EPSILON = 1e-4
"""Of AdamW: large enough that gradients that are 0 but for rounding, as of a key's bias, move no weight."""


@dataclass(frozen=True)
class Text:
    """A document: a prompt that is not trained, and a completion that is.

    Documents 2k and 2k + 1 of a case share their prompt, as completions of a group and pairs of preferences do.

    Attributes:
        prompt: token ids from 2.
        completion: token ids from 2; at least one.
        reward: of the completion.
    """

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    reward: float = 0.0

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and completion."""
        return self.prompt + self.completion

    def __str__(self) -> str:
        return f"{'.' * len(self.prompt)}{'#' * len(self.completion)} reward {self.reward:g}"


@dataclass(frozen=True)
class EngineCase:
    """Input of a run of an engine.

    Attributes:
        documents: of all steps, step by step.
        steps: optimizer steps.
        ranks: data-parallel ranks.
        each: documents of a micro-batch on a rank; accumulation follows from it.
        padding: columns beyond the longest document.
        packed: True to put the documents of a micro-batch into one row.
        optimizer: "sgd" without momentum, or "adamw" with an epsilon of `EPSILON`; no weight decay.
        learning_rate: constant.
        clip: bound of the gradient norm; None: no clip.
        resume_after: save after this step, and go on in a new engine from what was saved; None: one engine.
        weights: file of initial weights by name; "" for the engine's own.
        only_loss: the case asks for the reported loss alone, of other weights.
    """

    documents: tuple[Text, ...]
    steps: int = 1
    ranks: int = 1
    each: int = 1
    padding: int = 0
    packed: bool = False
    optimizer: Literal["sgd", "adamw"] = "sgd"
    learning_rate: float = 1.0
    clip: float | None = None
    resume_after: int | None = None
    weights: str = ""
    only_loss: bool = False

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step on each rank."""
        return len(self.documents) // (self.steps * self.each * self.ranks)

    def step(self, number: int) -> tuple[Text, ...]:
        """Return the documents of a step."""
        count = len(self.documents) // self.steps
        return self.documents[number * count : (number + 1) * count]

    def micro_batches(self, step: int, rank: int = 0) -> list[tuple[Text, ...]]:
        """Return a rank's micro-batches of a step: ranks take turns, each as many documents as a micro-batch has."""
        documents = self.step(step)
        parts = [documents[at : at + self.each] for at in range(0, len(documents), self.each)]
        return parts[rank :: self.ranks]

    def __str__(self) -> str:
        parts = [f"{self.ranks} rank(s)", f"micro-batches of {self.each} documents, {self.accumulation} on each rank"]
        parts += [f"{self.padding} more columns of padding"] if self.padding else []
        parts += ["packed"] if self.packed else []
        parts += [f"clip {self.clip:.4g}"] if self.clip is not None else []
        parts += [f"{self.steps} steps"] if self.steps > 1 else []
        parts += [f"resumed after step {self.resume_after}"] if self.resume_after else []
        return ", ".join(parts)


@dataclass(frozen=True)
class EngineStep:
    """Result of a case; tensors are whole, in float32 or float64.

    Attributes:
        before: weights before the first step, by name.
        after: those after the last.
        losses: the engine's reported loss of each step; () if it reports none.
        norms: its reported gradient norm of each step, before the clip; () if it reports none.
        refused: why the engine cannot run the case; "" if it ran.
        error: what it raised; "" if nothing.
        learning_rate: of the case.
    """

    before: Mapping[str, Tensor] = field(default_factory=dict)
    after: Mapping[str, Tensor] = field(default_factory=dict)
    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    refused: str = ""
    error: str = ""
    learning_rate: float = 1.0

    @property
    def update(self) -> dict[str, Tensor]:
        """Weights before minus those after, over the learning rate: with `sgd`, the applied gradient, in float64."""
        return {
            name: (value.double() - self.after[name].double()) / self.learning_rate
            for name, value in self.before.items()
        }


def norm(values: Mapping[str, Tensor]) -> float:
    """Return the norm over all tensors."""
    return float(sum(value.double().square().sum() for value in values.values())) ** 0.5


def write_cases(folder: Path, cases: Sequence[EngineCase]) -> None:
    """Write cases for a driver."""
    write_whole(folder / "cases.json", to_json([asdict(case) for case in cases]))


def read_cases(folder: Path) -> list[EngineCase]:
    """Read cases that `write_cases` wrote."""
    content = read_json(folder / "cases.json", requested=f"read cases in {folder}", fix="start drivers by `Script`")
    return [
        EngineCase(
            **{
                **each,
                "documents": tuple(
                    Text(tuple(text["prompt"]), tuple(text["completion"]), text["reward"]) for text in each["documents"]
                ),
            }
        )
        for each in content
    ]


def write_step(folder: Path, number: int, step: EngineStep) -> None:
    """Write the step of a case; its JSON is written last."""
    tensors = {f"{when}/{name}": v for when in ("before", "after") for name, v in getattr(step, when).items()}
    if tensors:
        write_tensors(folder / f"{number}.safetensors", {n: v.detach().cpu().contiguous() for n, v in tensors.items()})
    numbers = {name: getattr(step, name) for name in ("losses", "norms", "refused", "error", "learning_rate")}
    write_whole(folder / f"{number}.json", to_json(numbers))


def read_step(folder: Path, number: int) -> EngineStep:
    """Read a step that `write_step` wrote.

    Raises:
        RecordError: the driver did not reach it.
    """
    fix = "read the driver's last output"
    if not (folder / f"{number}.json").exists():
        raise RecordError(f"step {number} of an engine", found="no file", rule="a driver answers every case", fix=fix)
    content: dict[str, Any] = read_json(folder / f"{number}.json", requested=f"step {number} of an engine", fix=fix)
    file = folder / f"{number}.safetensors"
    tensors = read_tensors(file, requested=f"weights of step {number}", fix=fix) if file.exists() else {}
    weights: dict[str, dict[str, Tensor]] = {"before": {}, "after": {}}
    for name, value in tensors.items():
        when, _, parameter = name.partition("/")
        weights[when][parameter] = value
    losses, norms = tuple(content.pop("losses")), tuple(content.pop("norms"))
    return EngineStep(weights["before"], weights["after"], losses, norms, **content)


def check_step(step: EngineStep, what: str) -> None:
    """Raise unless a step has the same parameters before and after, and all of them are finite before.

    Raises:
        RecordError: it has not.
    """
    if set(step.before) != set(step.after) or not step.before:
        raise RecordError(
            what,
            found=f"{len(step.before)} parameters before and {len(step.after)} after",
            rule="a driver returns the whole weights before the first step and after the last",
            fix="correct the driver",
        )


def padded(documents: Sequence[Text], *, padding: int = 0, width: int = 0) -> dict[str, Tensor]:
    """Return documents as rows that are padded on the right, for trainers that take batches.

    Args:
        documents: one a row.
        padding: columns beyond the longest of them.
        width: least number of columns.

    Shapes:
        input_ids, labels (-100 where not trained), attention_mask: [documents, columns], int64.
    """
    columns = max(width, max(len(each.tokens) for each in documents)) + padding
    rows: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}
    for each in documents:
        rest = columns - len(each.tokens)
        rows["input_ids"].append([*each.tokens, *[PAD] * rest])
        rows["labels"].append([*[-100] * len(each.prompt), *each.completion, *[-100] * rest])
        rows["attention_mask"].append([1] * len(each.tokens) + [0] * rest)
    return {name: torch.tensor(values) for name, values in rows.items()}
