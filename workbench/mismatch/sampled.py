"""Search on some of a record's documents, where the model is large, and its result on all of them.

The switches are found on the documents that are furthest off and on others evenly spread over the record. What acts in
some documents only is then judged in every document.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.mismatch.computing import Computation
from workbench.mismatch.configuration import Configuration
from workbench.mismatch.factors import BY_NAME, State, Switch, score
from workbench.mismatch.search import Explanation, Found, configured, explain, switched

BUDGET = 5e9
"""Parameters times tokens of a pass of the search: some 0.3 s of a CPU core, of which a search takes hundreds."""
LEAST = 256
"""Tokens that the search has at least."""
OWN_TO_A_RECORD = ("respelled", "each")
"""Values that name a reading of the documents at hand."""


def explain_sampled(
    computation: Computation, stated: Configuration, recorded_T: Tensor, *, noise: float = 0.0
) -> Explanation:
    """`explain` on as many documents as the budget allows, and its switches in all of them."""
    numbers = chosen(computation, stated, recorded_T)
    if len(numbers) == len(computation.documents):
        return explain(computation, stated, recorded_T, noise=noise)
    few = computation.part(numbers)
    of_few_T = torch.cat([recorded_T[computation.document_T == n] for n in numbers])
    found = explain(few, stated, of_few_T, noise=noise)
    counted_T = computation.counted_T & recorded_T.isfinite()
    stated_T = computation.column(stated)
    state, pairs = Found((), stated_T, score(stated_T, recorded_T, counted_T)), []
    for switch in found.switches:
        state = switched(
            computation, stated, state, _of_all(computation, stated, state, switch, recorded_T), recorded_T, counted_T
        )
        pairs.append((state.switches[-1], dict(found.rivals).get(switch, ())))
    return Explanation(state.switches, state.column_T, stated_T, tuple(pairs))


def chosen(computation: Computation, stated: Configuration, recorded_T: Tensor) -> list[int]:
    """Documents for the search: all, or half of them the furthest off, and half evenly spread."""
    parameters = sum(weight.numel() for weight in computation.base.parameters())
    tokens_N = [len(d.prompt) + len(d.completion) for d in computation.documents]
    limit = max(LEAST, BUDGET / parameters)
    if sum(tokens_N) <= limit:
        return list(range(len(tokens_N)))
    off_T = (computation.column(stated) - recorded_T).abs().nan_to_num(0.0)
    sums_N = torch.zeros(len(tokens_N), dtype=torch.float64).index_add(0, computation.document_T, off_T)
    counts_N = torch.bincount(computation.document_T, minlength=len(tokens_N))
    furthest = (sums_N / counts_N).argsort(descending=True).tolist()
    step = max(1, round(2 * sum(tokens_N) / limit))
    spread = [n for first in range(step) for n in range(first, len(tokens_N), step)]
    numbers: list[int] = []
    for pair in zip(furthest, spread, strict=True):
        for n in pair:
            if n not in numbers and sum(tokens_N[m] for m in numbers) < limit:
                numbers.append(n)
    return sorted(numbers)


def _of_all(
    computation: Computation, stated: Configuration, state: Found, switch: Switch, recorded_T: Tensor
) -> Switch:
    """The switch for all documents; a reading of those at hand is proposed again."""
    if not any(str(value).startswith(OWN_TO_A_RECORD) for _, value in switch.changes):
        return Switch(switch.factor, switch.label, switch.changes)
    view = State(computation, configured(stated, state.switches), recorded_T, state.column_T)
    counted_T = computation.counted_T & recorded_T.isfinite()
    proposals = [
        switched(computation, stated, state, one, recorded_T, counted_T) for one in BY_NAME[switch.factor].propose(view)
    ]
    return min(proposals, key=lambda one: one.score).switches[-1] if proposals else switch
