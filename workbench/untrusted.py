"""JSON from outside: whatever a file has, either data or a ValueError.

Python's reader also raises RecursionError for deep nesting, and lets the last of two equal keys win.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def parse_json(content: bytes | str, *, convert: Callable[[dict[str, Any]], Any] = lambda mapping: mapping) -> Any:
    """Parse JSON; ``convert`` replaces each mapping.

    Raises:
        ValueError: not JSON, a key that occurs twice, or nested too deeply for this interpreter.
    """

    def unique(pairs: list[tuple[str, Any]]) -> Any:
        mapping = dict(pairs)
        if len(mapping) < len(pairs):
            keys = [key for key, _ in pairs]
            raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} occurs twice in a mapping")
        return convert(mapping)

    try:
        return json.loads(content, object_pairs_hook=unique)
    except RecursionError:
        raise ValueError("lists or mappings are nested too deeply") from None
