"""Routers in a step: routes that are replayed, the losses that balance routers, and what they did; for `train.step`.

The load-balancing loss is a product of two numbers of the whole step, the share of an expert's routes and its mean
probability. The first has no gradient: it is counted over all ranks and micro-batches before the first backward, so the
loss is a plain sum over tokens like any other, with weights that are data. Where routes are replayed they are data
already; otherwise a forward pass counts them.

Source: load balancing: Switch Transformer, arXiv 2101.03961, equations 4 to 6; for several experts of a token and for
        biases: DeepSeek-V3, arXiv 2412.19437, equations 16 to 19; z-loss: ST-MoE, arXiv 2202.08906, equation 5. Over
        the global batch: arXiv 2501.11873.

Letters: T packed tokens | t tokens of this rank | S tokens of the source batch | L mixtures | E experts | k experts of
a token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from workbench.errors import ShapeError, SpecError
from workbench.policy.model import Policy
from workbench.policy.routers import NO_ROUTE, Routers, Routes
from workbench.reduction.weights import StepTotals
from workbench.rollouts.batch import PADDING, Extension, RolloutBatch
from workbench.rollouts.targets import TrainingRow, shift_targets
from workbench.sharding.collectives import all_gather, all_sum, gather_many
from workbench.sharding.mesh import Mesh
from workbench.sharding.pipeline import share_tensors
from workbench.specs.mixtures import RoutingSpec
from workbench.train.rows import LocalRow

ROUTES = "routes"
"""Extension of a rollout batch: [S, L, k] experts of each token in each mixture, at the input; `NO_ROUTE` on the last
token of a document, which a sampler does not feed back, if it has none."""
INPUT_SOURCE = "input_source"
"""Extension of a row: [T] index of each input token in the source batch."""
NOTED = RoutingSpec(record=True)
"""Settings of a pass whose routes are recorded alone."""
BALANCE, Z = "router_balance", "router_z"
"""Names of the losses in the loss of a step."""


def check_routes(batch: RolloutBatch) -> None:
    """Raise unless a batch has a route for every token, other than the last ones of documents.

    Raises:
        SpecError: no routes.
        ShapeError: routes that are not whole numbers [S, L, k], of targets, missing for a token or for some of its
            mixtures, or with one expert twice.
    """
    extension = batch.extensions.get(ROUTES)
    if extension is None:
        raise SpecError(
            "replayed routes",
            found=f"a batch without the extension {ROUTES}",
            rule="experts of each token in each mixture, [tokens, mixtures, experts of a token], at the input token",
            fix="record the routes of the sampler, or of an earlier run with routing.record",
        )
    routes_SLk = extension.values
    known = extension.level == "token" and extension.at == "input"
    if not known or routes_SLk.dtype != torch.int64 or routes_SLk.dim() != 3:
        found = f"{extension.level} values at the {extension.at}, {routes_SLk.dtype} {list(routes_SLk.shape)}"
        _refuse(found, "int64 [tokens, mixtures, experts of a token], level token, at input", "convert them")
    missing_SL = (routes_SLk == NO_ROUTE).any(dim=2)
    ids = batch.document_ids_T
    last_S = torch.ones_like(ids, dtype=torch.bool)
    last_S[:-1] = ids[1:] != ids[:-1]
    partial_S = missing_SL.any(dim=1) & (ids != PADDING) & ~(last_S & (routes_SLk == NO_ROUTE).flatten(1).all(dim=1))
    if partial_S.any():
        token = int(torch.nonzero(partial_S)[0])
        _refuse(
            f"{int(partial_S.sum())} tokens without a route in some mixture, the first at {token}, in document "
            f"{int(ids[token])}",
            "every token has a route in every mixture; only the last one of a document may have none, in all of them",
            "leave such documents out, or record their routes again",
        )
    ordered_SLk = routes_SLk.sort(dim=2).values
    twice_S = ((ordered_SLk[..., 1:] == ordered_SLk[..., :-1]) & (ordered_SLk[..., 1:] != NO_ROUTE)).flatten(1).any(1)
    if (twice_S | (routes_SLk < NO_ROUTE).flatten(1).any(dim=1)).any():
        token = int(torch.nonzero(twice_S | (routes_SLk < NO_ROUTE).flatten(1).any(dim=1))[0])
        _refuse(
            f"experts {routes_SLk[token].tolist()} of token {token}",
            f"different experts from 0, or {NO_ROUTE} for none",
            "check the order of dimensions, and the record of the sampler",
        )


def _refuse(found: str, rule: str, fix: str) -> None:
    raise ShapeError(f"the extension {ROUTES} of a rollout batch", found=found, rule=rule, fix=fix)


def with_routes(batch: RolloutBatch, routes_SLk: Tensor) -> RolloutBatch:
    """Return a batch with the routes of its tokens, for a replay."""
    meaning = "experts of the token in each mixture"
    routes = Extension(routes_SLk, "token", "expert", meaning, pad=NO_ROUTE, at="input")
    return replace(batch, extensions={**batch.extensions, ROUTES: routes})


def with_input_source(packed: RolloutBatch) -> TrainingRow:
    """Return the training row of a packed row (`shift_targets`), with the number of each input in the source batch."""
    row = shift_targets(packed)
    return replace(row, extensions=row.extensions | {INPUT_SOURCE: packed.source_T})


def counted_tokens(row: TrainingRow, spec: RoutingSpec) -> Tensor:
    """[T] bool, tokens of documents that have a route."""
    counted_T = row.document_ids_T != PADDING
    return counted_T & (row.extensions[ROUTES][:, 0, 0] != NO_ROUTE) if spec.replays else counted_T


def routing_totals(rows: Sequence[TrainingRow], spec: RoutingSpec) -> dict[str, int]:
    """Numbers of the whole step, from all of its rows: tokens that count, and the largest expert of their routes."""
    totals = {"tokens": sum(int(counted_tokens(row, spec).sum()) for row in rows)}
    if spec.replays:
        totals["largest_expert"] = max(int(row.extensions[ROUTES].max()) for row in rows)
        totals["mixtures"], totals["chosen"] = rows[0].extensions[ROUTES].shape[1:]
    return totals


@dataclass
class StepRoutes:
    """The routers of a policy in one step.

    Attributes:
        policy, rows, spec, totals: of the step.
        share_LE: [L, E] share of each expert in the routes of the whole step, for the load-balancing loss.
        counts_LE: [L, E] routes that the rows of this rank took.
        differing: routes of this rank's tokens that the routers would have chosen otherwise.
        checksum: of the routes of this rank's tokens, see `checksum`.
        ungated: routes of this rank's tokens whose gate is 0, so that the expert is lost with its gradient.
        values: this rank's part of each loss, coefficient included.
        taken: of each row, by number, the experts of its tokens in each mixture of this rank.
    """

    policy: Policy
    rows: Sequence[LocalRow]
    spec: RoutingSpec
    totals: StepTotals
    share_LE: Tensor | None = None
    counts_LE: Tensor = field(init=False)
    differing: Tensor = field(init=False)
    checksum: Tensor = field(init=False)
    ungated: Tensor = field(init=False)
    values: dict[str, Tensor] = field(default_factory=dict)
    taken: dict[int, dict[int, Tensor]] = field(default_factory=lambda: defaultdict(dict))

    def __post_init__(self) -> None:
        routers = self.routers
        self.counts_LE = torch.zeros(
            len(routers.names), routers.experts, dtype=torch.float64, device=self.policy.mesh.device
        )
        self.differing, self.checksum, self.ungated = self.counts_LE.new_zeros(3).unbind()
        given, spec = self.totals.routing, self.spec
        known = (len(routers.names), routers.chosen)
        if spec.replays and (
            (given["mixtures"], given["chosen"]) != known or given["largest_expert"] >= routers.experts
        ):
            _refuse(
                f"{given['mixtures']} mixtures, {given['chosen']} experts of a token, the largest "
                f"{given['largest_expert']}",
                f"those of the model: {known[0]} mixtures, {known[1]} of {routers.experts} experts",
                "record the routes with this model; layers without experts have none",
            )
        if spec.bias_step and not routers.have_bias:
            raise SpecError(
                f"routing.bias_step = {spec.bias_step}",
                found="routers without a bias of the choice",
                rule="a model such as GLM-4.5 or DeepSeek-V3, whose checkpoint has the bias",
                fix="leave bias_step out, and balance with routing.balance",
            )

    @property
    def routers(self) -> Routers:
        """Those of the policy.

        Raises:
            SpecError: the policy was loaded without them.
        """
        if self.policy.routers is None:
            raise SpecError(
                "a step with routing settings",
                found="a policy that was loaded without routers",
                rule="routers are prepared as the policy is loaded",
                fix="load_policy(..., routing=True)",
            )
        return self.policy.routers

    def begin(self, number: int) -> Routes:
        """Routes of a pass of a row."""
        row = self.rows[number].row
        counted_T = counted_tokens(row, self.spec)
        if not self.spec.replays:
            return Routes(counted_T)
        return Routes(counted_T, torch.where(counted_T[:, None, None], row.extensions[ROUTES], NO_ROUTE))

    def count(self, run: Callable[[Callable[[int], Routes]], None]) -> None:
        """Count the routes of the whole step before its first backward, if a loss needs them. Collective.

        ``run`` passes all rows forward, with the routes that it gets for each; replayed ones are counted without.
        """
        if not self.spec.balance:
            return
        counts_LE, passes = torch.zeros_like(self.counts_LE), list[Routes]()
        if self.spec.replays:
            for number in range(len(self.rows)):
                routes = self.begin(number)
                assert routes.given_tLk is not None, "replayed"
                given_tLk = routes.given_tLk[routes.counted_t]
                for mixture in range(len(counts_LE)):
                    counts_LE[mixture] += _count(given_tLk[:, mixture], self.routers.experts)
        else:

            def begin(number: int) -> Routes:
                passes.append(self.begin(number))
                return passes[-1]

            with torch.no_grad():
                run(begin)
            for routes in passes:
                for mixture, noted in routes.noted.items():
                    counts_LE[mixture] += _count(noted.taken_tk[noted.counted_t], self.routers.experts)
        counts_LE = self.counts_of_step(counts_LE)
        self.share_LE = counts_LE / counts_LE.sum(dim=1, keepdim=True).clamp_min(1)

    def counts_of_step(self, counts_LE: Tensor) -> Tensor:
        """[L, E] routes of the whole step by expert, from those of this rank's rows. Collective."""
        if self.spec.replays:  # every rank of tp and pp has all of a row's
            return all_sum(counts_LE, self.policy.mesh["dp_cp"])
        return self._complete(counts_LE)

    def finish(self, number: int, routes: Routes) -> list[Tensor]:
        """Return the loss of a pass's routers, scaled for backward, if there is one; count what they did.

        Layout:   partial over dp and cp; with sequence parallelism over tp.
        Backward: to the logits of the routers.
        """
        routers, spec, tokens = self.routers, self.spec, max(self.totals.routing["tokens"], 1)
        parts: dict[str, list[Tensor]] = defaultdict(list)
        for mixture, (logits_tE, taken_tk, own_tk, counted_t, gates_tk) in routes.noted.items():
            if self.share_LE is not None:
                sums_E = routers.probabilities(mixture, logits_tE[counted_t]).sum(dim=0)
                share_E = self.share_LE[mixture].to(sums_E.dtype)
                parts[BALANCE].append(spec.balance * routers.experts / tokens * (share_E * sums_E).sum())
            if spec.z:
                parts[Z].append(spec.z / tokens * torch.logsumexp(_wide(logits_tE[counted_t]), dim=-1).square().sum())
            with torch.no_grad():
                self.counts_LE[mixture] += _count(taken_tk[counted_t], routers.experts)
                self.ungated += (gates_tk[counted_t] == 0).sum()
                if spec.replays:
                    differ_t = (taken_tk.sort(dim=1).values != own_tk.sort(dim=1).values).any(dim=1)
                    self.differing += (differ_t & counted_t).sum()
                    source_t = routers._own(self.rows[number].row.extensions[INPUT_SOURCE])
                    self.checksum += checksum(taken_tk[counted_t], source_t[counted_t], mixture)
                if spec.record:
                    self.taken[number][mixture] = taken_tk
        if not parts:
            return []
        sums = {name: torch.stack(values).sum() for name, values in parts.items()}
        for name, value in sums.items():
            self.values[name] = self.values.get(name, 0.0) + value.detach().double()
        return [self.totals.scale * self.policy.loss_scale * torch.stack(list(sums.values())).sum()]

    def _complete(self, part: Tensor) -> Tensor:
        """Sum over the ranks that have other tokens or other mixtures."""
        mesh: Mesh = self.policy.mesh
        over = ["dp_cp", "pp"] + (["tp"] if self.routers.share[1] > 1 else [])
        for axis in over:
            part = all_sum(part, mesh[axis])
        return part

    def losses(self) -> dict[str, Tensor]:
        """The complete losses of the routers. Collective; the same on every rank."""
        names = [name for name, coefficient in ((BALANCE, self.spec.balance), (Z, self.spec.z)) if coefficient]
        zero = self.counts_LE.new_zeros(())
        return {name: self._complete(zero + self.values.get(name, 0.0)) for name in names}

    def loads(self) -> Tensor:
        """[L, E] routes of the whole step by expert. Collective; the same on every rank.

        Raises:
            SpecError: some routes were not noted, so they were not replayed and have no loss either.
        """
        loads_LE = self._complete(self.counts_LE)
        expected = self.totals.routing["tokens"] * self.routers.chosen
        if silent := [n for n, loads_E in zip(self.routers.names, loads_LE, strict=True) if loads_E.sum() != expected]:
            raise SpecError(
                "a step with routing settings",
                found=f"{silent[0]} noted other routes than {expected}, those of the step's tokens",
                rule="every token passes each router once, inside a decoder layer",
                fix="leave routing out for this model",
            )
        return loads_LE

    def metrics(self, loads_LE: Tensor) -> dict[str, float]:
        """Metrics of the routers. Collective; the same on every rank."""
        mean_L = loads_LE.mean(dim=1).clamp_min(torch.finfo(torch.float64).tiny)
        routes = max(float(loads_LE.sum()), 1.0)
        ungated, differing, total = self._complete(torch.stack([self.ungated, self.differing, self.checksum])).tolist()
        numbers = {
            "router/load/max": float((loads_LE.amax(dim=1) / mean_L).max()),
            "router/zero_gates/share": ungated / routes,
        }
        if self.spec.replays:
            numbers["router/disagreement/share"] = differing * self.routers.chosen / routes
            numbers["router/replayed/checksum"] = total % _CHECKSUMS
        return numbers

    def in_source_order(self, num_source: int) -> Tensor | None:
        """[S, L, k] routes that were taken, on the host, or None if they are not recorded. Collective."""
        if not self.spec.record or not num_source:
            return None
        mesh, routers, numbers = self.policy.mesh, self.routers, range(len(self.rows))
        mixtures = sorted(self.taken[0])
        taken = [torch.cat([self._all_of_row(self.taken[row][mixture]) for row in numbers]) for mixture in mixtures]
        source = torch.cat([local.row.extensions[INPUT_SOURCE] for local in self.rows])
        source_of_all, *gathered = (torch.cat(pieces) for pieces in gather_many([source, *taken], mesh["dp_cp"]))
        is_token, ordered = source_of_all != PADDING, dict[str, Tensor]()
        for mixture, experts in zip(mixtures, gathered, strict=True):
            ordered[str(mixture)] = experts.new_full((num_source, routers.chosen), NO_ROUTE)
            ordered[str(mixture)][source_of_all[is_token]] = experts[is_token]
        shared = share_tensors(ordered, mesh)
        return torch.stack([shared[str(mixture)] for mixture in range(len(routers.names))], dim=1).cpu()

    def _all_of_row(self, taken_tk: Tensor) -> Tensor:
        if self.routers.share[1] == 1:
            return taken_tk
        return torch.cat(all_gather(taken_tk, self.policy.mesh["tp"]))


_CHECKSUMS = 2.0**40
"""Number of checksums: those of 8,000 ranks add up exactly in float64."""


def checksum(experts_tk: Tensor, source_t: Tensor, mixture: int) -> Tensor:
    """[] float64 whole number of the experts of tokens in a mixture, in any order; the sums of parts are the whole's.

    Two steps in which a token took another expert have other checksums but for one in 10^12.
    """
    each_tk = (experts_tk + 1) * 0x9E3779B1 + (source_t[:, None] + 1) * 0x85EBCA77 + (mixture + 1) * 0xC2B2AE3D
    for _ in range(2):  # the mixing of integers of MurmurHash3, whose constants these are
        each_tk = (each_tk ^ (each_tk >> 29)) * 0x165667B19E3779F9
    return (each_tk.sum() % int(_CHECKSUMS)).double()


def _count(experts: Tensor, size: int) -> Tensor:
    return torch.bincount(experts.flatten(), minlength=size).double()


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@torch.no_grad()
def balance_biases(policy: Policy, loads_LE: Tensor, step: float) -> None:
    """Move the bias of each expert's choice by ``step``, up where it had fewer routes than the mean, else down.

    Formula: b_e += step * sign(mean of the loads of the mixture - load_e), without a gradient
    """
    assert policy.routers is not None, "a policy with routing settings"
    for mixture, bias_E in policy.routers.biases(policy.model).items():
        loads_E = loads_LE[mixture].to(bias_E.device)
        bias_E.add_(step * torch.sign(loads_E.mean() - loads_E).to(bias_E.dtype))
