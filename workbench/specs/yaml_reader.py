"""YAML from outside: whatever a file has, either data or a yaml.YAMLError with the line.

PyYAML's reader also raises RecursionError for deep nesting, TypeError for keys that are lists, ValueError and
OverflowError of constructors (a 13th month, an integer of 5,000 digits), and lets the last of two equal keys win. It
follows aliases at no cost, but a few lines of nested ones stand for billions of values, which all later readers visit.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml

MAX_NODES = 1_000_000
"""Values in a file, with each alias counted as what it stands for: 1,000 configurations of 1,000 settings."""

MAX_DEPTH = 100
"""Lists and mappings inside each other; settings have at most 5 levels."""


def parse_yaml(text: str, name: str) -> Any:
    """Parse YAML from a file of this name.

    Raises:
        yaml.YAMLError: not YAML, a tag or value that cannot be read, a key that occurs twice, nested too deeply,
            aliases that refer to themselves or stand for more than `MAX_NODES` values.
    """
    loader = _Loader(text)
    loader.name = name
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _count(node, {}, [])
        return loader.construct_document(node)
    except RecursionError:
        raise yaml.YAMLError("lists or mappings are nested too deeply") from None
    finally:
        loader.dispose()


def _count(node: yaml.Node, known: dict[int, int], path: list[int]) -> int:
    """Values of a node, each alias counted as what it stands for."""
    if id(node) in path:
        raise _error("an alias stands for a value that it is in", node)
    if id(node) not in known:
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        path.append(id(node))
        nodes = [part for each in parts for part in (each if isinstance(each, tuple) else (each,))]
        known[id(node)] = 1 + sum(_count(part, known, path) for part in nodes)
        path.pop()
    if known[id(node)] > MAX_NODES:
        raise _error(f"aliases stand for more than {MAX_NODES:,} values", node)
    return known[id(node)]


class _Loader(yaml.SafeLoader):
    """YAML loader that rejects duplicate keys and deep nesting, and names the place of a value that cannot be read."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.depth > MAX_DEPTH:
            mark = self.peek_event().start_mark
            raise yaml.constructor.ConstructorError(
                None, None, f"more than {MAX_DEPTH} lists or mappings in each other", mark
            )
        self.depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise _error(f"{type(error).__name__}: {error}", node) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise _error(f"a key that is a {type(key).__name__}", key_node)
            line = key_node.start_mark.line + 1
            if key in seen and key != "<<":
                raise _error(f"{key!r} on line {seen[key]} and again on line {line}", key_node)
            seen[key] = line
        return super().construct_mapping(node, deep)


def _error(problem: str, node: yaml.Node) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
