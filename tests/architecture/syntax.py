"""The nodes of a syntax tree, faster than `ast.walk`: the tests of this folder go through every file of the project."""

from __future__ import annotations

import ast

SIGNS = (ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop)


def nodes(tree: ast.AST) -> list[ast.AST]:
    """Return a node and all nodes below it, breadth first, but for contexts (load, store) and operators."""
    reached = [tree]
    for node in reached:  # it grows meanwhile
        if isinstance(node, ast.Constant | ast.Name):
            continue
        for name in node._fields:
            value = getattr(node, name, None)
            if type(value) is list:
                reached += [each for each in value if isinstance(each, ast.AST) and not isinstance(each, SIGNS)]
            elif isinstance(value, ast.AST) and not isinstance(value, SIGNS):
                reached.append(value)
    return reached
