"""Systems translate: they name, reshape, cast and look up. Layers below compute with tensors."""

import ast
import re
from pathlib import Path

import pytest

SYSTEMS = Path(__file__).parents[2] / "workbench/systems"
# Metrics, the counterexample search and gradients of empty batches compute by design.
COMPUTING = {
    "metrics.py",
    "correction_metrics.py",
    "counterexample.py",
    "empty_batch.py",
}
TRANSLATING = sorted(path for path in SYSTEMS.rglob("*.py") if path.name not in COMPUTING)
SHAPED = re.compile(r"_[A-Z]{1,3}$")  # names of tensors end in their shape
# Names of tensors.
HOLDERS = {"case", "inputs", "said", "output", "head_output", "leaf", "row", "term", "replayed"}
TORCH = {
    "as_tensor",
    "zeros",
    "ones",
    "zeros_like",
    "ones_like",
    "full_like",
    "arange",
    "empty",
    "where",
    "bincount",
    "logical_and",
    "logical_not",
    "ge",
    "cat",
    "stack",
    "long",
    "bool",
    "float64",
    "int64",
    "Size",
    "Tensor",
    "autograd",
    "backward",
    "no_grad",
    "inference_mode",
    "nan",
    "inf",
    "unique",
    "nonzero",
}
METHODS = {
    "exp",
    "log",
    "log1p",
    "expm1",
    "sum",
    "mean",
    "std",
    "var",
    "prod",
    "clamp",
    "clamp_max",
    "sqrt",
    "square",
    "pow",
    "sigmoid",
    "softmax",
    "log_softmax",
    "logsumexp",
    "norm",
    "abs",
    "cumsum",
    "matmul",
    "mul",
    "div",
    "add",
    "sub",
    "neg",
    "amax",
    "amin",
    "maximum",
    "minimum",
    "index_add",
    "einsum",
    "rsqrt",
    "tanh",
}
ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.MatMult, ast.FloorDiv, ast.Mod)


def dotted(node):
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [*([node.id] if isinstance(node, ast.Name) else []), *reversed(parts)]


def is_tensor(node):
    """True if an operand is a tensor by its name; settings and constants are not."""
    if isinstance(node, ast.Name):
        return bool(SHAPED.search(node.id)) or node.id in HOLDERS
    if isinstance(node, ast.Attribute):
        named = dotted(node)
        return any(SHAPED.search(part) for part in named) or (
            named[:1] in ([h] for h in HOLDERS) and "config" not in named
        )
    if isinstance(node, ast.Subscript):
        return is_tensor(node.value)
    if isinstance(node, ast.UnaryOp):
        return is_tensor(node.operand)
    if isinstance(node, ast.BinOp):
        return is_tensor(node.left) or is_tensor(node.right)
    if isinstance(node, ast.Call):
        method = isinstance(node.func, ast.Attribute)
        return method and (dotted(node.func)[:1] == ["torch"] or is_tensor(node.func.value))
    return False


def computed(source):
    """Yield (line, source) of every expression that computes with tensors."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ARITHMETIC):
            operands = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.target, node.value)
            if any(map(is_tensor, operands)):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and is_tensor(node.operand):
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            named = dotted(node.func)
            of_torch = named[:1] == ["torch"] and not set(named[1:]) <= TORCH
            if of_torch or (node.func.attr in METHODS and named[:1] not in (["math"], ["torch"])):
                yield node.lineno, ast.unparse(node.func)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            module = getattr(node, "module", None) or node.names[0].name
            if module.startswith(("torch.nn", "torch.special", "numpy")):
                yield node.lineno, ast.unparse(node)


def test_every_system_is_covered():
    systems = [path for path in SYSTEMS.iterdir() if (path / "__init__.py").exists()]
    assert len(systems) == 14
    modules = ("__init__.py", "settings.py", "translate.py")
    assert {system / module for system in systems for module in modules} <= {*TRANSLATING}


@pytest.mark.parametrize("path", TRANSLATING, ids=lambda path: str(path.relative_to(SYSTEMS)))
def test_nothing_is_computed_of_tensors(path):
    assert list(computed(path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "ratio_T = (policy_T - old_T).exp()",
        "ratio_T = torch.exp(log_ratio_T)",
        "x = case['logprobs'] - case['old_logprobs']",
        "x = -inputs.policy_logprobs_T",
        "x = said.logprobs_T * 2.0",
        "x = head_output.logprobs_T * 2.0",
        "total_T += weight * values_T",
        "x = case['values'].mean()",
        "import torch.nn.functional as F",
        "from torch.nn.functional import logsigmoid",
    ],
)
def test_each_way_to_compute_is_seen(source):
    assert list(computed(source))


@pytest.mark.parametrize(
    "source",
    [
        "low = 1 - settings.clip",
        "temperature = 1.0 / settings.logits_scale_factor",
        "x_T = torch.where(mask_T, value_T, torch.zeros_like(value_T))",
        "notes = (*notes, 'one') + ('two',)",
        "known = {**a} | {**b}",
        "count = case.config['tokens'] / case.config['ranks']",
    ],
)
def test_translating_is_free(source):
    assert list(computed(source)) == []
