"""The task: problems can be checked independently, and the reward matches its definition."""

import pytest

from workbench.errors import ShapeError, SpecError
from workbench.rollouts.task import SYMBOLS, ArithmeticTask, Problem, named_task, task_file

TASK = ArithmeticTask()


def test_nineteen_symbols():
    assert TASK.vocab_size == len(set(SYMBOLS)) == 19
    assert {TASK.start_id, TASK.end_id, TASK.pad_id} == {16, 17, 18}


def test_text_survives_the_tokenizer():
    assert TASK.decode(TASK.encode(SYMBOLS)) == SYMBOLS
    assert TASK.encode("^10$") == [16, 1, 0, 17]


def test_foreign_text_is_refused():
    with pytest.raises(ShapeError, match="found: 'x', '÷'"):
        TASK.encode("3÷x")
    with pytest.raises(ShapeError, match=r"ids \[19\]"):
        TASK.decode([1, 19])


def test_problems_are_right():
    """Python's own arithmetic is the judge of every step."""
    for problem in TASK.problems(seed=3, count=300):
        assert eval(problem.expression) == problem.answer
        steps = problem.solution.removesuffix("$").split("=")
        assert [eval(step) for step in steps] == [problem.answer] * len(steps)
        assert steps[-1] == str(problem.answer)
        assert TASK.reward(problem.prompt, problem.solution) == 1.0


def test_problems_use_every_symbol_and_vary_in_length():
    documents = [p.prompt + p.solution for p in TASK.problems(seed=0, count=500)]
    assert set("".join(documents)) == set(SYMBOLS) - {"_"}
    lengths = [len(document) for document in documents]
    assert min(lengths) <= 10
    assert max(lengths) >= 40
    assert max(lengths) <= 64


def test_problems_depend_on_the_seed_alone():
    assert TASK.problems(5, 40)[:10] == TASK.problems(5, 10)
    assert TASK.problems(5, 10) != TASK.problems(6, 10)


@pytest.mark.parametrize(
    ("expression", "solution"),
    [
        ("37+85-12", "122-12=110$"),
        ("2*(30-4)+5", "2*26+5=52+5=57$"),
        ("9-2*3", "9-6=3$"),
        ("7+8", "15$"),
    ],
)
def test_solutions_are_worked_out_in_the_usual_order(expression, solution):
    assert Problem(expression, eval(expression)).solution == solution


@pytest.mark.parametrize(
    ("completion", "expected_reward"),
    [
        ("122-12=110$", 1.0),
        ("110$", 1.0),
        ("99=110$", 1.0),
        ("122-12=111$", 0.1),
        ("122-12$", 0.0),
        ("122-12=$", 0.0),
        ("$", 0.0),
        ("", 0.0),
        ("110", 0.0),
        ("110$$", 0.0),
        ("110$5$", 0.0),
        ("5$=110$", 0.0),
        ("0110$", 0.0),
        ("-110$", 0.0),
        ("110$_", 0.0),
    ],
)
def test_reward(completion, expected_reward):
    assert TASK.reward("^37+85-12=", completion) == expected_reward


@pytest.mark.parametrize(
    "prompt", ["37+85=", "^37+85", "^37+=", "^=", "^3-5=", "^3-5+9=", "^9-(3-5)=", "^(3+4=", "^5="]
)
def test_a_reward_without_a_problem_is_refused(prompt):
    with pytest.raises(ShapeError, match="no such expression"):
        TASK.reward(prompt, "1$")


# ---- tasks of others ---------------------------------------------------------------------------------------------

TASKS = '''
from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Copying:
    """Says what it is told."""

    right_reward: float = 2.0
    end_ids: tuple[int, ...] = (17,)

    def prompts(self, seed: int, count: int) -> list[str]:
        return [f"{seed}{i}" for i in range(count)]

    def encode(self, text: str) -> list[int]:
        return [int(c) for c in text]

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))

    def reward(self, prompt: str, completion: str) -> float:
        return 0.0


EAGER = Copying(right_reward=5.0)


class Lazy:
    end_ids = (17,)

    def prompts(self, seed, count):
        return []


UNENDED, ONE_END = Copying(end_ids=[None]), Copying(end_ids=2)


class Asks(Copying):
    def __init__(self, question):
        self.question = question
'''


@pytest.fixture
def tasks(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "tasks.py").write_text(TASKS)
    return tmp_path


def test_prompts_are_those_of_the_problems():
    assert TASK.prompts(5, 4) == [problem.prompt for problem in TASK.problems(5, 4)]
    assert TASK.prompts(5, 6)[:4] == TASK.prompts(5, 4) != TASK.prompts(6, 4)


def test_the_arithmetic_is_a_task_by_its_name(tmp_path):
    task = named_task("arithmetic", tmp_path)
    assert isinstance(task, ArithmeticTask)
    assert (task.end_ids, task.right_reward) == ((SYMBOLS.index("$"),), 1.0)


def test_a_class_or_an_object_of_a_file_is_a_task(tasks):
    made, result = (named_task(f"mine/tasks.py:{name}", tasks) for name in ("Copying", "EAGER"))
    assert (made.right_reward, result.right_reward) == (2.0, 5.0)
    assert made.decode(made.encode(made.prompts(3, 2)[1])) == "3 1"
    absolute = named_task(f"{tasks / 'mine' / 'tasks.py'}:Copying", tasks / "elsewhere")
    assert absolute.prompts(0, 1) == ["00"]
    assert task_file("mine/tasks.py:EAGER", tasks) == (tasks / "mine" / "tasks.py", "EAGER")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sorting", "found: no task of that name\n  rule: +arithmetic, or FILE.py:NAME"),
        ("mine/tasks.py", "no task of that name"),
        ("mine/tasks:Copying", "no task of that name"),
        ("mine/tasks.py:", "no task of that name"),
        ("mine/other.py:Copying", "found: no file .*other.py"),
        ("mine/tasks.py:Sorting", "found: no Sorting in "),
        ("mine/tasks.py:Lazy", "found: Lazy has no right_reward, encode, decode, reward"),
        ("mine/tasks.py:Asks", "found: Asks cannot be constructed: .*question"),
        (
            "mine/tasks.py:UNENDED",
            r"found: UNENDED.end_ids = \[None\]\n  rule: a sequence (.|\n)*tokenizer.eos_token_id",
        ),
        ("mine/tasks.py:ONE_END", "found: ONE_END.end_ids = 2\n"),
    ],
)
def test_an_invalid_task_is_refused(name, words, tasks):
    with pytest.raises(SpecError, match=words):
        named_task(name, tasks)


def test_a_task_file_outside_of_the_project_is_reported(tasks, monkeypatch):
    monkeypatch.chdir(tasks)
    here, there = (folder / "mine" / "tasks.py" for folder in (tasks, tasks / "project"))
    with pytest.raises(SpecError) as caught:
        task_file("mine/tasks.py:Copying", tasks / "project")
    assert caught.value.parts["found"] == f"no file {there}, although there is {here}, relative to the current folder"
    assert caught.value.parts["fix"] == f"write online.task: {here}:Copying"
    assert task_file(f"{here}:Copying", tasks / "project") == (here, "Copying")
    assert str(tasks / "project") in caught.value.parts["rule"]
