"""Prompts and rewards of a task as an online run takes them: each is checked before anything is sampled or trained.

A task is a user's class, so errors name the prompt or completion, what the task returned, and the fix.
"""

from __future__ import annotations

import itertools
import math
import operator
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from workbench.errors import SpecError
from workbench.rollouts.task import Task
from workbench.sharding.collectives import all_max
from workbench.sharding.mesh import Mesh
from workbench.specs.run import RunSpec
from workbench.train.rows import multiples
from workbench.train.seeds import seed_of


@dataclass(frozen=True)
class TaskReader:
    """A task with the limits of a run.

    Attributes:
        task: whose prompts and rewards are read.
        spec: of the run.
        vocabulary: ids of the policy.
        positions: of prompt and completion together that the sampler's model has; None: any number.
    """

    task: Task
    spec: RunSpec
    vocabulary: int
    positions: int | None

    def prompts(self, number: int) -> list[str]:
        """Return the prompts of a sampling."""
        online = self.spec.online
        prompts = list(self.task.prompts(seed_of(self.spec.seed, number), online.prompts))
        if len(prompts) != online.prompts:
            raise SpecError(
                f"{online.prompts} prompts of {online.task}",
                found=f"{len(prompts)}",
                rule="a task returns the requested number of prompts",
                fix="correct its prompts()",
            )
        return prompts

    def encoded(self, prompt: str) -> list[int]:
        """Return the ids of a prompt, to which the longest completion fits."""
        encoded, size = self.task.encode(prompt), self.vocabulary
        try:
            tokens = [operator.index(token) for token in encoded]
        except TypeError as error:
            raise SpecError(
                f"tokens of the prompt {prompt!r}",
                found=f"a {type(encoded).__name__}, {reprlib.repr(encoded)}",
                rule="encode() returns a flat sequence of integers: a list, or one row of a tensor",
                fix="return tokenizer(text).input_ids, not tokenizer(text) and not a list of such lists",
            ) from error
        if not tokens or not all(0 <= token < size for token in tokens):
            raise SpecError(
                f"tokens of the prompt {prompt!r}",
                found=f"{tokens}",
                rule=f"at least one, each from 0 to {size - 1}, of the policy's own vocabulary",
                fix="correct encode() of the task, or take the model of its tokenizer",
            )
        longest, positions = len(tokens) + self.spec.online.max_new_tokens, self.positions
        self._check_row_size(prompt, longest)
        if positions is not None and longest > positions:
            raise SpecError(
                f"a completion of {self.spec.online.max_new_tokens} tokens to {prompt!r}",
                found=f"{len(tokens)} tokens of the prompt, and a model of {positions} positions",
                rule="every token of prompt and completion has a position",
                fix="lower online.max_new_tokens, or take shorter prompts",
            )
        return tokens

    def _check_row_size(self, prompt: str, longest: int) -> None:
        """Raise an error if the longest completion fits no row: it could end the run hours later."""
        data, online = self.spec.data, self.spec.online
        together = online.answers if data.keep_groups or self.spec.loss.needs_pairs else 1
        needed = multiples(self.spec.layout, self.spec.reproducible)
        padded = -(-longest // needed.document) * needed.document
        row = data.multiple_of or needed.row
        if data.micro_batch_tokens is not None and together * padded > data.micro_batch_tokens // row * row:
            raise SpecError(
                f"data.micro_batch_tokens = {data.micro_batch_tokens} for completions of up to "
                f"{online.max_new_tokens} tokens to {prompt!r}",
                found=f"{together} document(s) of up to {padded} tokens in one row, and rows in multiples of {row}",
                rule="a row holds the longest completion with its prompt, and those that it is compared with",
                fix=f"take at least {-(-together * padded // row) * row}, or lower online.max_new_tokens",
            )

    def check_equal(self, encoded: Sequence[Sequence[int]], mesh: Mesh) -> None:
        """Raise an error unless all ranks have the same prompts: completions would be joined to the wrong ones."""
        local = seed_of(*itertools.starmap(seed_of, encoded))
        both = torch.tensor([local, -local], device=mesh.device)
        most = all_max(all_max(both, mesh["tp"]), mesh["dp_cp"])  # the maximum, and minus the minimum
        if int(most[0]) != -int(most[1]):
            raise SpecError(
                f"prompts of {self.spec.online.task}",
                found="others on another rank",
                rule="prompts(seed, count) returns the same for the same seed, in every process",
                fix="draw them from random.Random(seed) alone: the order of a set, hash() of a text, the "
                "time or a pid differ between processes",
            )

    def reward(self, prompt: str, tokens: Sequence[int]) -> float:
        """Return the reward of a completion."""
        text = self._decoded(tokens)
        value = self.task.reward(prompt, text)
        try:
            reward = float(value)
        except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several numbers
            reward = math.nan
        if not math.isfinite(reward):
            raise SpecError(
                f"reward of the completion {text!r} to {prompt!r}",
                found=reprlib.repr(value),
                rule="a reward is a finite number",
                fix="correct reward() of the task",
            )
        return reward

    def _decoded(self, tokens: Sequence[int]) -> str:
        """Decode a completion. The policy may sample any id of its vocabulary, including ids unknown to the task."""
        try:
            return self.task.decode(tokens)
        except (LookupError, ValueError) as error:
            known = getattr(self.task, "vocab_size", None)
            unknown = [token for token in tokens if known is None or token >= known]
            if not unknown:
                raise
            task_size = "" if known is None else f" and a task of {known}"
            raise SpecError(
                f"online.task = {self.spec.online.task!r} with model.source = {self.spec.model.source!r}",
                found=f"a completion with the ids {unknown}, which decode() does not accept "
                f"({type(error).__name__}), of a policy of {self.vocabulary} ids{task_size}",
                rule="decode() accepts every id of the policy's vocabulary",
                fix="take a task with the tokenizer of this model, or decode other ids as padding",
            ) from error
