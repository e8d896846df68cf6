"""Tasks with a checkable reward: the interface, and step-by-step arithmetic with one character per token.

A prompt of the arithmetic is ``^37+85-12=``; a right completion is ``122-12=110$``: the expression again after each
operation, then the result, then the end. The 19 symbols are chosen so that neither 2 nor 4 divides the vocabulary.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from workbench.errors import ShapeError, SpecError
from workbench.user_file import load

START, END, PAD = "^", "$", "_"
SYMBOLS = "0123456789+-*()=" + START + END + PAD

_WHOLE_NUMBER = re.compile(r"0|[1-9][0-9]*")
# In order of precedence; each rule takes its leftmost match.
_OPERATIONS = tuple(re.compile(rule) for rule in (r"\((\d+)([-+*])(\d+)\)", r"(\d+)(\*)(\d+)", r"(\d+)([-+])(\d+)"))


class Task(Protocol):
    """Interface of a task for online training: prompts, a tokenizer, and a reward for every completion.

    Attributes:
        end_ids: tokens of which any ends a completion.
        right_reward: reward of a fully right completion; `reward/right/fraction` counts those.
    """

    end_ids: Sequence[int]
    right_reward: float

    def prompts(self, seed: int, count: int) -> Iterable[str]:
        """The first ``count`` prompts of a seed; the same in every process."""
        ...

    def encode(self, text: str) -> Iterable[int]:
        """Vocabulary ids of a prompt, in the policy's own vocabulary, such as ``tokenizer(text).input_ids``."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a completion, its end included."""
        ...

    def reward(self, prompt: str, completion: str) -> float:
        """Reward of a completion, a finite number."""
        ...


@dataclass(frozen=True)
class Problem:
    """An expression and its value, which is never negative.

    Example:
        >>> problem = Problem("2*(30-4)+5", 57)
        >>> problem.prompt, problem.solution
        ('^2*(30-4)+5=', '2*26+5=52+5=57$')
    """

    expression: str
    answer: int

    @property
    def prompt(self) -> str:
        """Prompt of the policy."""
        return f"{START}{self.expression}="

    @property
    def solution(self) -> str:
        """The right completion, step by step."""
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
    end_ids: Sequence[int] = (end_id,)
    right_reward = 1.0

    def encode(self, text: str) -> list[int]:
        """Vocabulary ids of a text; ShapeError for a character that is not a symbol of the task."""
        if unknown := sorted(set(text) - set(SYMBOLS)):
            raise ShapeError(
                f"ArithmeticTask.encode({text!r})",
                found=", ".join(map(repr, unknown)),
                rule=f"the symbols are {SYMBOLS}",
                fix="write the problem with these symbols",
            )
        return [SYMBOLS.index(character) for character in text]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of vocabulary ids; ShapeError for an id outside the vocabulary."""
        if outside := [int(token) for token in tokens if not 0 <= token < self.vocab_size]:
            raise ShapeError(
                "ArithmeticTask.decode",
                found=f"ids {outside}",
                rule=f"0 <= id < {self.vocab_size}",
                fix="decode only ids of this task's encode, without padding",
            )
        return "".join(SYMBOLS[token] for token in tokens)

    def problems(self, seed: int, count: int) -> list[Problem]:
        """The first ``count`` problems of a seed; a longer list begins with the shorter one."""
        draw = random.Random(f"arithmetic {seed}")
        problems: list[Problem] = []
        while len(problems) < count:
            expression = _expression(draw)
            values = _steps(expression)
            if values and _WHOLE_NUMBER.fullmatch(values[-1]):
                problems.append(Problem(expression, int(values[-1])))
        return problems

    def prompts(self, seed: int, count: int) -> list[str]:
        """The prompts of `problems`."""
        return [problem.prompt for problem in self.problems(seed, count)]

    def reward(self, prompt: str, completion: str) -> float:
        """Reward of a completion.

        Units: 1.0 if the last number is the value of the expression; 0.1 if it is another number; 0.0 if the
            completion does not end with one end symbol after a whole number. The steps before it are not checked.

        Raises:
            ShapeError: the prompt is not one of this task.
        """
        expression = prompt.removeprefix(START).removesuffix("=")
        values = _steps(expression)
        if prompt != f"{START}{expression}=" or not values or not _WHOLE_NUMBER.fullmatch(values[-1]):
            raise ShapeError(
                f"ArithmeticTask.reward: prompt {prompt!r}",
                found="no such expression",
                rule="^EXPRESSION= whose steps and value are 0 or more",
                fix="score completions of prompts of this task",
            )
        last = completion.removesuffix(END).rpartition("=")[2]
        if not completion.endswith(END) or completion.count(END) != 1 or not _WHOLE_NUMBER.fullmatch(last):
            return 0.0
        return 1.0 if last == values[-1] else 0.1


def _expression(draw: random.Random) -> str:
    """Draw two to four terms; among two or three of them sometimes a product or parentheses."""

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
    """The expression after each operation, down to its value; [] if it cannot be evaluated.

    A negative intermediate result leaves a sign that no rule matches, and gives [] as well.
    """
    steps: list[str] = []
    while not _WHOLE_NUMBER.fullmatch(expression):
        operation = next((match for rule in _OPERATIONS if (match := rule.search(expression))), None)
        if operation is None:
            return []
        left, operator, right = int(operation[1]), operation[2], int(operation[3])
        value = {"+": left + right, "-": left - right, "*": left * right}[operator]
        expression = expression[: operation.start()] + str(value) + expression[operation.end() :]
        steps.append(expression)
    return steps


def named_task(name: str, project: Path) -> Task:
    """Load the task that a spec names: ``arithmetic``, or ``FILE.py:NAME``, a class or object of a user's file.

    Relative paths begin at ``project``.

    Raises:
        SpecError: no such task or file, or an object that lacks an attribute of `Task`, or has no ids in its end_ids.
    """
    if name == "arithmetic":
        return ArithmeticTask()
    file, attribute = task_file(name, project)
    task = load(file, attribute, setting="online.task")
    if isinstance(task, type):
        try:
            task = task()
        except TypeError as error:
            raise _unusable(
                name,
                f"{attribute} cannot be constructed: {error}",
                "a class is called without arguments",
                "give its arguments defaults, or name an object of the file",
            ) from error
    required = (*Task.__annotations__, "prompts", "encode", "decode", "reward")
    if missing := [member for member in required if not hasattr(task, member)]:
        rule = f"a task has {', '.join(required)}; see workbench.rollouts.task.Task"
        raise _unusable(name, f"{attribute} has no {', '.join(missing)}", rule, "add what is missing")
    try:
        list(map(operator.index, task.end_ids))
    except TypeError as error:
        raise _unusable(
            name,
            f"{attribute}.end_ids = {task.end_ids!r}",
            "a sequence of ids of which any ends a completion",
            "write end_ids = [tokenizer.eos_token_id]; if that is None the tokenizer has no end token, "
            "so name the id of the token that is to end a completion",
        ) from error
    return task


def _unusable(name: str, found: str, rule: str, fix: str) -> SpecError:
    return SpecError(f"online.task = {name!r}", found=found, rule=rule, fix=fix)


def task_file(name: str, project: Path) -> tuple[Path, str]:
    """The file of a user's task, and the task's name in it.

    Raises:
        SpecError: not of the form FILE.py:NAME, or no such file.
    """
    path, colon, attribute = name.rpartition(":")
    if not (colon and path.endswith(".py") and attribute.isidentifier()):
        fix = "name a file that ends in .py and a class in it, such as tasks/sorting.py:Sorting"
        raise _unusable(name, "no task of that name", "arithmetic, or FILE.py:NAME", fix)
    if not (project / path).is_file():
        problem, fix = f"no file {project / path}", "check the path, or give an absolute one"
        if (in_cwd := Path.cwd() / path).is_file():
            problem += f", although there is {in_cwd}, relative to the current folder"
            fix = f"write online.task: {in_cwd}:{attribute}"
        rule = (
            f"a relative path begins at the project root, {project}: the current folder if it has a "
            "folder named data, else the folder of the workbench's sources"
        )
        raise _unusable(name, problem, rule, fix)
    return project / path, attribute
