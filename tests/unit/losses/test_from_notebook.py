"""Functions of a notebook as the text of a file that defines what they use."""

import math
from dataclasses import dataclass as data

import pytest
import torch

from workbench.errors import SpecError
from workbench.losses.from_notebook import source_of, written_losses

SCALE = 3.0
TABLE = torch.ones(2)


def helper(x):
    return math.sqrt(x) * SCALE


def loss(inputs, *, clip=0.2):
    def inner(x):
        return helper(x)

    return torch.tensor(inner(inputs)) if data else None


def with_table(inputs):
    return TABLE * inputs


def executed(text):
    space = {}
    exec(compile(text, "written.py", "exec"), space)
    return space


@pytest.fixture
def as_in_a_notebook(monkeypatch):
    for function in (helper, loss, with_table):
        monkeypatch.setattr(function, "__module__", "__main__")


def test_the_text_is_a_file_that_defines_all_that_is_used(as_in_a_notebook):
    text = source_of(loss)
    assert executed(text)["loss"](4.0) == torch.tensor(6.0)
    assert {"import math", "import torch", "from dataclasses import dataclass as data"} <= set(text.splitlines())
    assert "SCALE = 3.0" in text


@pytest.mark.parametrize(
    ("function", "part"), [(with_table, "TABLE"), (lambda x: x, "lambda"), (math.sqrt, "sqrt"), (str.upper, "upper")]
)
def test_what_cannot_be_written_is_named(as_in_a_notebook, function, part):
    with pytest.raises(SpecError, match=part):
        source_of(function)


def test_only_names_of_losses_are_written(as_in_a_notebook):
    written = {}
    settings = {"base": {"loss": {"name": loss, "settings": {"clip": 0.1}}}, "configurations": {"a": {}}}
    result = written_losses(settings, lambda name, text: written.setdefault(name, text) and f"folder/{name}.py")
    assert result == {
        "base": {"loss": {"name": "folder/loss.py:loss", "settings": {"clip": 0.1}}},
        "configurations": {"a": {}},
    }
    assert list(written) == ["loss"]
