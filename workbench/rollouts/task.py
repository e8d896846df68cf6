"""A task with a checkable reward: what one is, and arithmetic worked out step by step, one character a token.

A prompt of the arithmetic is ``^37+85-12=``; a right answer is ``122-12=110$``: the expression again after each
operation, then the result, then the end. Nobody has to judge an answer: `ArithmeticTask.reward` computes the result.

The 19 symbols are chosen so that neither 2 nor 4 divides the vocabulary.
"""

from __future__ import annotations

import hashlib
import importlib.util
import operator
import random
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Protocol

from workbench.errors import ShapeError, SpecError

START, END, PAD = "^", "$", "_"
SYMBOLS = "0123456789+-*()=" + START + END + PAD

_WHOLE_NUMBER = re.compile(r"0|[1-9][0-9]*")
# What is worked out first stands first; each rule takes the leftmost place where it fits.
_OPERATIONS = tuple(re.compile(rule) for rule in (r"\((\d+)([-+*])(\d+)\)", r"(\d+)(\*)(\d+)", r"(\d+)([-+])(\d+)"))


class Task(Protocol):
    """What online training asks of a task: prompts, the text of tokens and back, and a reward for every answer.

    Attributes:
        end_ids: tokens of which any ends an answer.
        right_reward: what an answer earns that is wholly right; `reward/right/fraction` counts those.
    """

    end_ids: Sequence[int]
    right_reward: float

    def prompts(self, seed: int, count: int) -> Iterable[str]:
        """So many prompts; the same for the same seed, in every process."""
        ...

    def encode(self, text: str) -> Iterable[int]:
        """Vocabulary ids of a prompt, in the policy's own vocabulary, such as ``tokenizer(text).input_ids``."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of an answer, its end included."""
        ...

    def reward(self, prompt: str, completion: str) -> float:
        """How good an answer is, a finite number."""
        ...


@dataclass(frozen=True)
class Problem:
    """An expression and its value.

    Attributes:
        expression: such as ``37+85-12``.
        answer: such as 110, never negative.

    Example:
        >>> problem = Problem("2*(30-4)+5", 57)
        >>> problem.prompt, problem.solution
        ('^2*(30-4)+5=', '2*26+5=52+5=57$')
    """

    expression: str
    answer: int

    @property
    def prompt(self) -> str:
        """What the policy is given."""
        return f"{START}{self.expression}="

    @property
    def solution(self) -> str:
        """What a policy that works it out writes."""
        return "=".join(_steps(self.expression)) + END


class ArithmeticTask:
    """Problems of two to four numbers with sums, differences, products and at most one pair of parentheses.

    Example:
        >>> task = ArithmeticTask()
        >>> task.decode(task.encode("^37+85="))
        '^37+85='
        >>> task.reward("^37+85=", "122$"), task.reward("^37+85=", "121$"), task.reward("^37+85=", "122")
        (1.0, 0.1, 0.0)
    """

    vocab_size = len(SYMBOLS)
    start_id, end_id, pad_id = (SYMBOLS.index(symbol) for symbol in (START, END, PAD))
    end_ids = (end_id,)
    right_reward = 1.0

    def encode(self, text: str) -> list[int]:
        """Vocabulary ids of a text.

        Raises:
            ShapeError: a character that is no symbol of the task.
        """
        unknown = sorted(set(text) - set(SYMBOLS))
        if unknown:
            raise ShapeError(
                f"ArithmeticTask.encode({text!r})",
                found=f"{', '.join(map(repr, unknown))}",
                rule=f"the symbols are {SYMBOLS}",
                fix="write the problem with these symbols",
            )
        return [SYMBOLS.index(character) for character in text]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of vocabulary ids.

        Raises:
            ShapeError: an id outside the vocabulary.
        """
        outside = [int(token) for token in tokens if not 0 <= token < self.vocab_size]
        if outside:
            raise ShapeError(
                "ArithmeticTask.decode",
                found=f"ids {outside}",
                rule=f"0 <= id < {self.vocab_size}",
                fix="decode only what this task encoded, padding taken off",
            )
        return "".join(SYMBOLS[token] for token in tokens)

    def problems(self, seed: int, count: int) -> list[Problem]:
        """The first ``count`` problems of a seed; a longer list begins with the shorter one."""
        draw = random.Random(f"arithmetic {seed}")
        found: list[Problem] = []
        while len(found) < count:
            expression = _expression(draw)
            values = _steps(expression)
            if values and _WHOLE_NUMBER.fullmatch(values[-1]):
                found.append(Problem(expression, int(values[-1])))
        return found

    def prompts(self, seed: int, count: int) -> list[str]:
        """The prompts of `problems`."""
        return [problem.prompt for problem in self.problems(seed, count)]

    def reward(self, prompt: str, completion: str) -> float:
        """How good an answer is.

        Units: 1.0 if the last number is the value of the expression; 0.1 if it is another number; 0.0 if the
            answer does not end with one end symbol after a whole number. The steps before it are the policy's
            own business.

        Raises:
            ShapeError: the prompt is none of this task's.
        """
        expression = prompt.removeprefix(START).removesuffix("=")
        values = _steps(expression)
        if prompt != f"{START}{expression}=" or not values or not _WHOLE_NUMBER.fullmatch(values[-1]):
            raise ShapeError(
                f"ArithmeticTask.reward: prompt {prompt!r}",
                found="no such expression",
                rule="^EXPRESSION= whose steps and value are 0 or more",
                fix="score answers to prompts of this task",
            )
        last = completion.removesuffix(END).rpartition("=")[2]
        if not completion.endswith(END) or completion.count(END) != 1 or not _WHOLE_NUMBER.fullmatch(last):
            return 0.0
        return 1.0 if last == values[-1] else 0.1


def _expression(draw: random.Random) -> str:
    """Two to four terms; among two or three of them sometimes a product or parentheses."""

    def number() -> str:
        return str(draw.randint(1, 99 if draw.random() < 0.5 else 20))

    terms = [number() for _ in range(draw.choice((2, 3, 3, 4)))]
    kind = draw.random() if len(terms) < 4 else 1.0
    if kind < 0.15:
        terms[draw.randrange(len(terms))] = f"{draw.randint(2, 9)}*{draw.randint(2, 9)}"
    elif kind < 0.3:
        terms[-1] = f"{draw.randint(2, 4)}*({draw.randint(1, 9)}+{draw.randint(1, 9)})"
    elif kind < 0.4:
        terms[-1] = f"({draw.randint(10, 30)}-{draw.randint(1, 10)})"
    return "".join(term + draw.choice("+-") for term in terms)[:-1]


def _steps(expression: str) -> list[str]:
    """The expression after each operation, down to its value; [] if it cannot be worked out.

    A negative number on the way leaves a sign that no rule takes away, and gives [] as well.
    """
    steps: list[str] = []
    while not _WHOLE_NUMBER.fullmatch(expression):
        found = next((match for rule in _OPERATIONS if (match := rule.search(expression))), None)
        if found is None:
            return []
        left, operator, right = int(found[1]), found[2], int(found[3])
        value = {"+": left + right, "-": left - right, "*": left * right}[operator]
        expression = expression[: found.start()] + str(value) + expression[found.end() :]
        steps.append(expression)
    return steps


def named_task(name: str, project: Path) -> Task:
    """The task that a spec names: ``arithmetic``, or ``FILE.py:NAME``, a class or object of a user's file.

    Args:
        name: of the task.
        project: folder that a relative path begins at.

    Raises:
        SpecError: no such task or file, or an object that lacks something of `Task`, or has no ids in its end_ids.
    """
    if name == "arithmetic":
        return ArithmeticTask()
    file, attribute = task_file(name, project)
    module = _loaded(file)
    if not hasattr(module, attribute):
        raise SpecError(
            f"online.task = {name!r}",
            found=f"no {attribute} in {file.name}",
            rule="FILE.py:NAME names a class or an object of the file",
            fix="correct the name",
        )
    task = getattr(module, attribute)
    if isinstance(task, type):
        try:
            task = task()
        except TypeError as error:
            raise SpecError(
                f"online.task = {name!r}",
                found=f"{attribute} cannot be made: {error}",
                rule="a class is called without arguments",
                fix="give its arguments defaults, or name an object of the file",
            ) from error
    wanted = (*Task.__annotations__, "prompts", "encode", "decode", "reward")
    if lacking := [one for one in wanted if not hasattr(task, one)]:
        raise SpecError(
            f"online.task = {name!r}",
            found=f"{attribute} has no {', '.join(lacking)}",
            rule=f"a task has {', '.join(wanted)}; see workbench.rollouts.task.Task",
            fix="add what is missing",
        )
    try:
        list(map(operator.index, task.end_ids))
    except TypeError as error:
        raise SpecError(
            f"online.task = {name!r}",
            found=f"{attribute}.end_ids = {task.end_ids!r}",
            rule="a sequence of the ids of which any ends an answer",
            fix="write end_ids = [tokenizer.eos_token_id]; where that is None the tokenizer has no end, "
            "so name the id of the token that is to end an answer",
        ) from error
    return task


def _loaded(file: Path) -> ModuleType:
    """The module of a file, under a name that no other module has; dataclasses look their own up."""
    name = f"workbench_task_{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:8]}"
    found = importlib.util.spec_from_file_location(name, file)
    assert found is not None, "a .py file can be loaded"
    assert found.loader is not None, "a .py file can be loaded"
    sys.modules[name] = module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def task_file(name: str, project: Path) -> tuple[Path, str]:
    """The file of a user's task, and what it is called there.

    Raises:
        SpecError: not of the form FILE.py:NAME, or no such file.
    """
    path, colon, attribute = name.rpartition(":")
    if not (colon and path.endswith(".py") and attribute.isidentifier()):
        raise SpecError(
            f"online.task = {name!r}",
            found="no task of that name",
            rule="arithmetic, or FILE.py:NAME",
            fix="name a file that ends in .py and a class in it, such as tasks/sorting.py:Sorting",
        )
    if not (project / path).is_file():
        found, fix = f"no file {project / path}", "check the path, or give an absolute one"
        if (beside_us := Path.cwd() / path).is_file():
            found += f", although there is {beside_us}, relative to the current folder"
            fix = f"write online.task: {beside_us}:{attribute}"
        raise SpecError(
            f"online.task = {name!r}",
            found=found,
            fix=fix,
            rule=f"a relative path begins at the project root, {project}: the current folder if it holds a "
            "folder named data, else where the workbench's sources lie",
        )
    return project / path, attribute
