"""alibaba/ROLL: the clipped loss of its RLVR pipeline, of tokens or rows; its pickled batches."""

from __future__ import annotations

from workbench.systems.registry import System
from workbench.systems.roll.dump import read_dump
from workbench.systems.roll.metrics import LEFT_OUT, names
from workbench.systems.roll.settings import ActorSettings
from workbench.systems.roll.translate import CONTRACTS, back, translate

SYSTEM = System(
    name="roll",
    title="ROLL",
    version="8eb27cc2",
    settings=ActorSettings,
    translate=translate,
    back=back,
    scaling=CONTRACTS,
    arrays=("old_logprobs", "ref_logprobs", "entropies"),
    unsupported_arrays={"rollout_logprobs": "ROLL's train_infer_correction is not translated"},
    aliases=names,
    left_out=LEFT_OUT,
    read_dump=read_dump,
)
