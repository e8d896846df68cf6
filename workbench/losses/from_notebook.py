"""A loss that is a function of a notebook or script, as the text of a file that ranks can execute."""

from __future__ import annotations

import builtins
import dis
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from workbench.errors import SpecError


def source_of(function: Callable[..., Any]) -> str:
    """Return the text of a file that defines a function and what it uses.

    Imported modules and names become imports, numbers and text become constants, other functions of the notebook are
    copied.

    Raises:
        SpecError: no source, a method or closure, or a name whose value cannot be written, such as a tensor.
    """
    imports: dict[str, None] = {"from __future__ import annotations": None}
    constants: dict[str, None] = {}
    functions: dict[str, str] = {}
    _collect(function, function.__name__, imports, constants, functions)
    body = "\n\n\n".join(reversed(functions.values()))
    head = [line for line in imports if len(imports) > 1 or constants or "__future__" not in line]
    return "\n".join([*head, *constants]) + ("\n\n\n" if head or constants else "") + body


def _collect(
    function: Any, name: str, imports: dict[str, None], constants: dict[str, None], functions: dict[str, str]
) -> None:
    """Add a function's source and everything that it uses."""
    if name in functions:
        return
    if not isinstance(function, types.FunctionType) or function.__name__ == "<lambda>" or function.__closure__:
        raise _unusable(name, "a lambda, closure, method or object", "a function with `def` at the top of a cell")
    try:
        functions[name] = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError) as error:
        raise _unusable(name, f"no source: {error}", "a function whose text Python knows") from None
    for used in _globals_of(function.__code__):
        if used in function.__globals__:
            _write(used, function.__globals__[used], imports, constants, functions)
        elif not hasattr(builtins, used):
            raise _unusable(name, f"it uses {used}, which is not defined", "every name that it uses is defined")


def _globals_of(code: types.CodeType) -> Iterator[str]:
    """Names that code, and the functions in it, read as globals."""
    yield from (step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals_of(constant)


def _write(
    name: str, value: Any, imports: dict[str, None], constants: dict[str, None], functions: dict[str, str]
) -> None:
    """Add a name that a function uses."""
    if isinstance(value, types.ModuleType):
        imports[f"import {value.__name__}" + (f" as {name}" if name != value.__name__ else "")] = None
        return
    module = getattr(value, "__module__", None)
    qualified = getattr(value, "__qualname__", None)
    if module not in (None, "__main__", "builtins") and qualified == getattr(value, "__name__", ""):
        imports[f"from {module} import {qualified}" + (f" as {name}" if name != qualified else "")] = None
    elif isinstance(value, types.FunctionType):
        _collect(value, name, imports, constants, functions)
    elif value is None or isinstance(value, bool | int | float | str):
        constants[f"{name} = {value!r}"] = None
    else:
        raise _unusable(
            name, f"a {type(value).__name__}", "names of the notebook are modules, functions, numbers or text"
        )


def _unusable(name: str, found: str, rule: str) -> SpecError:
    return SpecError(
        f"{name} in a loss of this notebook",
        found=found,
        rule=f"ranks execute the loss in processes of their own: {rule}",
        fix="pass the value as one of loss.settings, or write the loss to a file: loss: {name: FILE.py:NAME}",
    )


def written_losses(settings: Mapping[str, Any], write: Callable[[str, str], str]) -> dict[str, Any]:
    """Return settings in which every function that is a loss's name has been written to a file.

    Args:
        settings: of an ablation or a run.
        write: called with the function's name and the text of its file, returns the path in the spec.
    """

    def written(value: Any, key: str) -> Any:
        if isinstance(value, Mapping):
            return {name: written(each, str(name)) for name, each in value.items()}
        if key == "name" and callable(value):
            name = getattr(value, "__name__", "loss")
            return f"{write(name, source_of(value))}:{name}"
        return value

    return {name: written(each, str(name)) for name, each in settings.items()}
