"""Places of each number in a tensor of ids, such as the tokens of every document, found in one pass.

A comparison with one number after the other (``ids_T == number``) costs the tokens once for each document.

Letters: T tokens, or documents, with an id each.
"""

from __future__ import annotations

from torch import Tensor


def places_of_each(ids_T: Tensor) -> dict[int, Tensor]:
    """Map each number of a tensor to its places, numbers and places ascending; padding has a number too.

    Shapes:  [T] integers -> a [number of places] each, which together are all of T.

    Example:
        >>> {number: places.tolist() for number, places in places_of_each(torch.tensor([7, 0, 7, -1])).items()}
        {-1: [3], 0: [1], 7: [0, 2]}
    """
    sorted_T, order_T = ids_T.sort(stable=True)
    numbers, counts = sorted_T.unique_consecutive(return_counts=True)
    return dict(zip(numbers.tolist(), order_T.split(counts.tolist()), strict=True))
