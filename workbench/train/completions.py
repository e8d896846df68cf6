"""Completions and rewards of all ranks, on each rank: each document was sampled by one of them.

Letters: N documents of a sampling | M length limit of a completion | K size of the largest truncated support | t tokens
of prompt and completion | L mixtures of experts | k experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from workbench.policy.routers import Routers
from workbench.policy.sampling import Completion
from workbench.sharding.collectives import all_max, all_sum
from workbench.sharding.mesh import Axis, Mesh
from workbench.specs.online import OnlineSpec


def gather_completions(
    own: Mapping[int, tuple[Completion, float]], online: OnlineSpec, routers: Routers | None, mesh: Mesh
) -> tuple[list[Completion], Tensor]:
    """Gather completions and rewards on every rank: an exact sum, as each is 0 on all ranks but one."""
    tokens_NM = torch.zeros(online.documents, online.max_new_tokens, dtype=torch.int64)
    numbers_NM = torch.zeros(online.documents, 2 * online.max_new_tokens + 2, dtype=torch.float64)
    longest = max((len(ids) for completion, _ in own.values() for ids in completion.supports), default=0)
    if online.truncates:
        longest = int(_over_ranks(all_max, torch.tensor(longest), mesh))
    # Ids plus 1, so that 0 is no id; as many as the largest support has.
    supports_NMK = torch.zeros(online.documents, online.max_new_tokens, longest, dtype=torch.int64)
    for document, (completion, reward) in own.items():
        count = len(completion.tokens)
        tokens_NM[document, :count] = torch.tensor(completion.tokens)
        numbers_NM[document, :count] = torch.tensor(completion.logprobs, dtype=torch.float64)
        numbers_NM[document, -2:] = torch.tensor([count, reward], dtype=torch.float64)
        if online.truncates:
            masses = slice(online.max_new_tokens, online.max_new_tokens + count)
            numbers_NM[document, masses] = torch.tensor(completion.masses, dtype=torch.float64)
        for place, ids in enumerate(completion.supports):
            supports_NMK[document, place, : len(ids)] = torch.tensor(ids) + 1
    gathered = (tokens_NM, numbers_NM, supports_NMK) if online.truncates else (tokens_NM, numbers_NM)
    tokens_NM, numbers_NM, *more = (_over_ranks(all_sum, local_NM, mesh) for local_NM in gathered)
    routes: dict[int, Tensor] = {}
    if routers is not None:
        of_own = {number: completion for number, (completion, _) in own.items()}
        routes = _gather_routes(of_own, online.documents, routers, mesh)
    completions = []
    for document, count in enumerate(numbers_NM[:, -2].long().tolist()):
        logprobs, masses = numbers_NM[document, : 2 * online.max_new_tokens].view(2, -1)[:, :count].tolist()
        kept = [(row[row > 0] - 1).tolist() for row in more[0][document, :count]] if more else []
        tokens = tokens_NM[document, :count].tolist()
        completions.append(Completion(tokens, logprobs, kept, masses if more else [], routes.get(document)))
    return completions, numbers_NM[:, -1]


def _gather_routes(own: Mapping[int, Completion], documents: int, routers: Routers, mesh: Mesh) -> dict[int, Tensor]:
    """Gather the routes of the sampler's completions on every rank, by document."""
    routes = {n: completion.routes_tLk for n, completion in own.items() if completion.routes_tLk is not None}
    lengths_N = torch.zeros(documents, dtype=torch.int64)
    for document, of_document_tLk in routes.items():
        lengths_N[document] = len(of_document_tLk)
    lengths_N = _over_ranks(all_sum, lengths_N, mesh)
    shape = (len(lengths_N), int(lengths_N.max()), len(routers.names), routers.chosen)
    routes_NtLk = torch.zeros(shape, dtype=torch.int64)
    for document, of_document_tLk in routes.items():
        routes_NtLk[document, : len(of_document_tLk)] = of_document_tLk
    routes_NtLk = _over_ranks(all_sum, routes_NtLk, mesh)
    return {document: routes_NtLk[document, :length] for document, length in enumerate(lengths_N.tolist())}


def _over_ranks(reduce: Callable[[Tensor, Axis], Tensor], local: Tensor, mesh: Mesh) -> Tensor:
    """Reduce a tensor over all ranks that sample; on the CPU."""
    return reduce(reduce(local.to(mesh.device), mesh["tp"]), mesh["dp_cp"]).cpu()
