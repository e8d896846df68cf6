"""The tokens that divide a loss are added up over data-parallel ranks, not over context-parallel ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from workbench.faults import Fault
from workbench.sharding.collectives import all_sum
from workbench.sharding.mesh import Mesh
from workbench.specs.run import RunSpec


def _broken(prepare_rows: Callable) -> Callable:
    def count_over_dp(batch: object, spec: RunSpec, mesh: Mesh, *more: object) -> Any:
        rows, totals = prepare_rows(batch, spec, mesh, *more)
        if spec.loss.denominator != "token":
            return rows, totals
        here = torch.stack([local.row.loss_mask_T.sum() for local in rows]).sum().double()
        counted = float(all_sum(here, mesh["dp"]))
        factor = totals.tokens / max(counted, 1.0)
        return [
            replace(local, weights={name: pair.map(lambda w_T: w_T * factor) for name, pair in local.weights.items()})
            for local in rows
        ], totals

    return count_over_dp


FAULT = Fault(
    family="B",
    what="numerator and count are reduced over data-parallel ranks alone: each context-parallel rank divides its share "
    "of the tokens by the tokens of those with its own place on the axis",
    origin="a fork of NVIDIA/Megatron-LM (NMFW-17, bridge to cp > 1), after NVIDIA/Megatron-LM#4368",
    signature="loss and gradient about cp times too big; exactly so where all places hold as many trained tokens, "
    "else turned towards those that hold few; nothing at cp = 1",
    seam="prepare_rows",
    broken=_broken,
    shows_in={"layout": {"cp": 2}},
    hidden_in={"layout": {"cp": 1}},
    detected_by="tests/faults/test_unseen.py::test_tokens_counted_over_dp_only_are_cp_times_too_few",
)
