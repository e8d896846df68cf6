"""Shape letters, checked in public functions.

A name ends in its logical shape (``logprobs_T``, ``weight_VD``); `check_shapes` checks several tensors against one set
of letters and reports every mismatch at once.

    T packed tokens | V vocabulary | D model dimension | N documents in the packed row
    G completions in a group | P prompts | C chunks
"""

from __future__ import annotations

from torch import Tensor

from workbench.errors import ShapeError


def check_shapes(where: str, **tensors: Tensor | None) -> dict[str, int]:
    """Check named tensors against the letters at the end of their names.

    Args:
        where: the calling function, for the message.
        **tensors: ``name_LETTERS=tensor``; None is skipped.

    Returns:
        The size of every letter.

    Raises:
        ShapeError: a rank or a size disagrees; the message lists every mismatch.

    Example:
        >>> import torch
        >>> check_shapes("demo", logits_TV=torch.zeros(3, 5), targets_T=torch.zeros(3))
        {'T': 3, 'V': 5}
    """
    known: dict[str, int] = {}
    first: dict[str, str] = {}
    wrong: list[str] = []
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        letters = name.rpartition("_")[2]
        if tensor.dim() != len(letters):
            wrong.append(f"{name} has shape {tuple(tensor.shape)}, which is not [{', '.join(letters)}]")
            continue
        for letter, size in zip(letters, tensor.shape, strict=True):
            if known.setdefault(letter, size) == size:
                first.setdefault(letter, name)
                continue
            other = tensors[first[letter]]
            assert other is not None, "the letter was seen in it"
            shapes = f"shapes {tuple(tensor.shape)} and {tuple(other.shape)}"
            wrong.append(f"{name} has {letter}={size}, but {first[letter]} has {letter}={known[letter]} ({shapes})")
    if wrong:
        raise ShapeError(
            f"{where}: shapes disagree",
            found="; ".join(wrong),
            rule="the capitals that end a name are its logical shape",
            fix="pass tensors whose shapes agree",
        )
    return known
