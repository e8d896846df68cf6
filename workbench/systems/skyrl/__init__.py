"""NovaSky-AI/SkyRL: policy losses on advantages that are divided by the count of the mini-batch; its dumped batches."""

from __future__ import annotations

from workbench.systems.registry import LOGPROBS, System
from workbench.systems.skyrl.advantages import estimator_of
from workbench.systems.skyrl.dump import read_dump
from workbench.systems.skyrl.metrics import names
from workbench.systems.skyrl.settings import AlgorithmSettings
from workbench.systems.skyrl.translate import CONTRACTS, back, translate

SYSTEM = System(
    name="skyrl",
    title="SkyRL",
    version="0.3.0",
    settings=AlgorithmSettings,
    translate=translate,
    back=back,
    scaling=CONTRACTS,
    arrays=(*LOGPROBS, "entropies", "group_ids"),
    aliases=names,
    estimator=estimator_of,
    read_dump=read_dump,
)
