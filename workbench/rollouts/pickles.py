"""Restricted reader of pickles: it builds plain data, and imports and calls nothing that a file names.

A pickle is a program for a stack machine, and Python's own machine calls whatever the program names. This one runs the
opcodes that build containers, numbers and text. A global is a name that is looked up in a table of constructors
(`Known`); a name that is not there is refused before it is used. No attribute is set, no module is imported.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, BinaryIO, NamedTuple

from workbench.errors import RecordError, WorkbenchError

RULE = "numbers, text, containers, tensors and numpy arrays; nothing that a file names is imported or called"
FIX = "save tensors and plain containers only, or write the interchange format: docs/guides/check-a-step.md"
_OLDER = {"__builtin__": "builtins", "copy_reg": "copyreg"}


class Global(NamedTuple):
    """The name of a class or function, "module.name"; it is never imported."""

    name: str


@dataclass(frozen=True)
class Known:
    """Globals that a pickle may name; all others are refused.

    Attributes:
        constants: name -> its value.
        calls: name -> constructor, called with the arguments.
        states: name -> constructor of objects that have a state, called with (arguments, state).
    """

    constants: Mapping[str, Any] = field(default_factory=dict)
    calls: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    states: Mapping[str, Callable[[tuple[Any, ...], Any], Any]] = field(default_factory=dict)

    def __or__(self, other: Known) -> Known:
        return Known(
            {**self.constants, **other.constants}, {**self.calls, **other.calls}, {**self.states, **other.states}
        )


@dataclass(eq=False)
class _Unbuilt:
    """An object of `Known.states` before its state was read."""

    name: str
    arguments: tuple[Any, ...]
    memo: list[int] = field(default_factory=list)


def read_pickle(
    content: bytes | BinaryIO, known: Known, *, what: str, persistent: Callable[[Any], Any] | None = None
) -> Any:
    """Read one pickle, of any protocol, as plain data.

    Args:
        content: the pickle; a stream is left behind its end.
        known: the globals that it may name.
        what: its name in errors.
        persistent: value of a persistent id, such as a tensor's storage; None: there are none.

    Raises:
        RecordError: a global that is not known, by name; an opcode that builds more than data; a damaged pickle.
    """
    machine = _Machine(known, what, persistent)
    stream = BytesIO(content) if isinstance(content, bytes) else content
    try:
        for opcode, argument, _ in pickletools.genops(stream):
            machine.run(opcode.name, argument)
        return machine.stack.pop()
    except WorkbenchError:
        raise
    except (Exception, MemoryError, RecursionError) as error:  # whatever a damaged file makes of the machine
        raise damaged(what, f"{type(error).__name__}: {error}") from None


class _Machine:
    """The stack, the marks and the memo of a pickle that is being read."""

    def __init__(self, known: Known, what: str, persistent: Callable[[Any], Any] | None) -> None:
        self.known, self.what, self.persistent = known, what, persistent
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, opcode: str, argument: Any) -> None:
        if opcode in _VALUES:
            self.stack.append(argument)
        elif opcode in _SIMPLE:
            _SIMPLE[opcode](self)
        elif opcode in _WITH_ARGUMENT:
            _WITH_ARGUMENT[opcode](self, argument)
        elif opcode not in ("PROTO", "FRAME", "STOP"):
            raise self.refused(f"the opcode {opcode}")

    def refused(self, subject: str) -> RecordError:
        return RecordError(f"read {self.what}", found=subject, rule=RULE, fix=FIX)

    def to_mark(self) -> list[Any]:
        """Take everything above the last mark off the stack."""
        start = self.marks.pop()
        items, self.stack[start:] = self.stack[start:], []
        return items

    def top(self, kind: type) -> Any:
        """Return the container on top of the stack, which an opcode fills."""
        if type(self.stack[-1]) is not kind:
            raise self.refused(f"items of a {_kind(self.stack[-1])} where a {kind.__name__} is filled")
        return self.stack[-1]

    def remember(self, index: int) -> None:
        self.memo[index] = self.stack[-1]
        if isinstance(self.stack[-1], _Unbuilt):
            self.stack[-1].memo.append(index)

    def find(self, module: str, name: str) -> Any:
        """Look a global up: its constant, or its name if it has a constructor."""
        module = _OLDER.get(module, module).replace("numpy.core.", "numpy._core.")
        path = f"{module}.{name}"
        if path in self.known.constants:
            return self.known.constants[path]
        if path not in self.known.calls and path not in self.known.states:
            raise self.refused(f"the global {path}")
        return Global(path)

    def construct(self, function: Any, arguments: Any) -> None:
        """Push the result of a known constructor; an object with a state waits for it."""
        if not isinstance(function, Global) or not isinstance(arguments, tuple):
            raise self.refused(f"a call of a {_kind(function)}")
        if function.name in self.known.states:
            self.stack.append(_Unbuilt(function.name, arguments))
        else:
            self.stack.append(self.known.calls[function.name](*arguments))

    def reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        self.construct(function, arguments)

    def new_with_keywords(self) -> None:
        if self.stack.pop():
            raise self.refused("a constructor with keywords")
        self.reduce()

    def build(self) -> None:
        """Finish an object with its state, also where the memo has it."""
        state, unbuilt = self.stack.pop(), self.stack.pop()
        if not isinstance(unbuilt, _Unbuilt):
            raise self.refused(f"a state of a {_kind(unbuilt)}")
        value = self.known.states[unbuilt.name](unbuilt.arguments, state)
        self.stack.append(value)
        self.memo.update(dict.fromkeys(unbuilt.memo, value))

    def set_items(self, items: list[Any]) -> None:
        self.top(dict).update(zip(items[::2], items[1::2], strict=True))

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items([key, value])

    def append(self) -> None:
        value = self.stack.pop()
        self.top(list).append(value)

    def take(self, number: int) -> tuple[Any, ...]:
        items = tuple(self.stack[-number:])
        del self.stack[-number:]
        return items

    def pop(self) -> None:
        if self.marks and self.marks[-1] == len(self.stack):
            self.marks.pop()
        else:
            self.stack.pop()

    def stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.stack.append(self.find(str(module), str(name)))

    def object(self) -> None:
        function, *arguments = self.to_mark()
        self.construct(function, tuple(arguments))

    def persist(self, name: Any) -> None:
        if self.persistent is None:
            raise self.refused("a persistent id")
        self.stack.append(self.persistent(name))


def _kind(value: Any) -> str:
    return value.name if isinstance(value, Global | _Unbuilt) else type(value).__name__


def damaged(what: str, found: str) -> RecordError:
    """The error about a file that is not what its kind says."""
    return RecordError(f"read {what}", found=found, rule="a whole file, as its writer left it", fix="copy it again")


_TEXTS = ("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")
_NUMBERS = ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT")
_VALUES = frozenset((*_TEXTS, *_NUMBERS, "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"))
"""Opcodes that push their argument."""
_SIMPLE: dict[str, Callable[[_Machine], Any]] = {
    "NONE": lambda m: m.stack.append(None),
    "NEWTRUE": lambda m: m.stack.append(True),
    "NEWFALSE": lambda m: m.stack.append(False),
    "MARK": lambda m: m.marks.append(len(m.stack)),
    "EMPTY_TUPLE": lambda m: m.stack.append(()),
    "EMPTY_LIST": lambda m: m.stack.append([]),
    "EMPTY_DICT": lambda m: m.stack.append({}),
    "EMPTY_SET": lambda m: m.stack.append(set()),
    "TUPLE1": lambda m: m.stack.append(m.take(1)),
    "TUPLE2": lambda m: m.stack.append(m.take(2)),
    "TUPLE3": lambda m: m.stack.append(m.take(3)),
    "TUPLE": lambda m: m.stack.append(tuple(m.to_mark())),
    "LIST": lambda m: m.stack.append(m.to_mark()),
    "DICT": lambda m: m.stack.append(dict(zip(*[iter(m.to_mark())] * 2, strict=True))),
    "FROZENSET": lambda m: m.stack.append(frozenset(m.to_mark())),
    "APPEND": _Machine.append,
    "APPENDS": lambda m: (items := m.to_mark(), m.top(list).extend(items)),
    "ADDITEMS": lambda m: (items := m.to_mark(), m.top(set).update(items)),
    "SETITEM": _Machine.set_item,
    "SETITEMS": lambda m: m.set_items(m.to_mark()),
    "POP": _Machine.pop,
    "POP_MARK": _Machine.to_mark,
    "DUP": lambda m: m.stack.append(m.stack[-1]),
    "MEMOIZE": lambda m: m.remember(len(m.memo)),
    "STACK_GLOBAL": _Machine.stack_global,
    "REDUCE": _Machine.reduce,
    "NEWOBJ": _Machine.reduce,
    "NEWOBJ_EX": _Machine.new_with_keywords,
    "OBJ": _Machine.object,
    "BUILD": _Machine.build,
    "BINPERSID": lambda m: m.persist(m.stack.pop()),
}
_WITH_ARGUMENT: dict[str, Callable[[_Machine, Any], Any]] = {
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), _Machine.remember),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda m, index: m.stack.append(m.memo[index])),
    "GLOBAL": lambda m, path: m.stack.append(m.find(*path.split(" ", 1))),
    "INST": lambda m, path: m.construct(m.find(*path.split(" ", 1)), tuple(m.to_mark())),
    "PERSID": _Machine.persist,
}
