"""verl's metrics of sampler and trainer, against loops over its rectangles, and merged from parts."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.helpers.metric_rows import inputs_of, nasty_documents
from tests.oracles.systems import verl as oracle
from workbench.losses.corrections import apply_correction, step_statistics
from workbench.losses.terms import Term
from workbench.metrics.quantities import DocumentSlots
from workbench.metrics.values import finish_metrics
from workbench.sharding.mesh import Axis
from workbench.specs.losses import LossSpec
from workbench.systems.metrics import as_named_by, settings_of

ALONE = Axis("dp_cp")
WEIGHTS = {
    "token": ({"ratio": "token", "ratio_high": 1.1}, {"rollout_is": "token", "rollout_is_threshold": 1.1}),
    "sequence": ({"ratio": "document_sum", "ratio_high": 2.0}, {"rollout_is": "sequence", "rollout_is_threshold": 2.0}),
    "zeroed": (
        {
            "ratio": "token",
            "ratio_low": 0.9,
            "ratio_high": 1.2,
            "outside": "zero",
            "normalize": True,
            "mean_epsilon": 1e-8,
        },
        {"rollout_is": "token", "rollout_is_threshold": "0.9_1.2", "rollout_is_batch_normalize": True},
    ),
    "divided": (
        {"ratio": "document_sum", "ratio_high": 1.3, "normalize": True, "mean_epsilon": 1e-8},
        {"rollout_is": "sequence", "rollout_is_threshold": 1.3, "rollout_is_batch_normalize": True},
    ),
}
GATES = {
    "token_k1": {"gate": "k1", "gate_low": math.log(0.9), "gate_high": math.log(1.1)},
    "seq_mean_k2": {"gate": "k2", "gate_level": "document_mean", "gate_high": 0.02},
    "seq_sum_k3": {"gate": "k3", "gate_level": "document_sum", "gate_high": 0.1},
    "seq_max_k3": {"gate": "k3", "gate_level": "document_max", "gate_high": 0.1},
}
BOUNDS = {"token_k1": "0.9_1.1", "seq_mean_k2": "0.02", "seq_sum_k3": "0.1", "seq_max_k3": "0.1"}


def rectangle_of(documents):
    width = max(len(document["mask"]) for document in documents)
    return [
        np.array(
            [
                [float(v) if counts else 0.0 for v, counts in zip(document[name], document["mask"], strict=True)]
                + [0.0] * (width - len(document["mask"]))
                for document in documents
            ]
        )
        for name in ("old", "sampler", "mask")
    ]


def named(documents, correction, parts=1, **settings):
    """Finished numbers of a batch that is split into parts, each with the correction of the whole."""
    inputs, mask = inputs_of(documents)
    spec = LossSpec(correction={"log_clamp": 20.0, **correction})
    inputs = replace(inputs, loss_mask_T=mask)
    inputs = replace(inputs, statistics=step_statistics([inputs], spec.correction))
    term = apply_correction(Term(torch.zeros(len(mask)).double()), inputs, spec.correction)
    results = []
    for part in range(parts):
        at = list(range(part, len(mask), parts))
        own, own_mask = inputs_of(documents, at)
        own_term = Term(term.values_T[at], extras={name: value[at] for name, value in term.extras.items()})
        slots = DocumentSlots(0, len(documents))
        results.append(
            as_named_by(
                "verl",
                own,
                own_mask,
                terms={"policy": own_term},
                loss_spec=spec,
                slots=slots,
                settings=settings_of(spec, slots)._replace(only=("rollout_corr/",), **settings),
            )
        )
    return finish_metrics(results, ALONE)


@pytest.mark.parametrize(("weights", "gate"), list(itertools.product(WEIGHTS, GATES)))
def test_numbers_are_those_of_the_definitions_however_the_batch_is_split(weights, gate):
    for seed in range(2):
        documents = nasty_documents(seed, infinite=False)
        assert not all(any(document["mask"]) for document in documents)
        ours, theirs = WEIGHTS[weights]
        settings = {**theirs, "rollout_rs": gate, "rollout_rs_threshold": BOUNDS[gate]}
        expected = oracle.rollout_correction(settings, *rectangle_of(documents))[2]
        correction = {**ours, **GATES[gate]}
        for parts in (1, 3):
            metrics = named(documents, correction, parts)
            assert metrics.keys() == expected.keys()
            for name, value in expected.items():
                assert metrics[name] == pytest.approx(value, rel=1e-9, abs=1e-9), name


def test_shares_of_sequences_may_be_of_single_precision():
    documents = nasty_documents(0, infinite=False)
    double, single = (
        named(documents, {**WEIGHTS["token"][0], **GATES["seq_max_k3"]}, single=flag) for flag in (False, True)
    )
    apart = {name for name in double if double[name] != single[name]}
    assert apart
    assert all("fraction" in name for name in apart)
    assert {name: single[name] for name in apart} == {name: float(np.float32(double[name])) for name in apart}


def test_without_a_correction_only_the_mismatch_is_named():
    metrics = named(nasty_documents(0, infinite=False), {"log_clamp": None})
    assert len(metrics) == 13
    assert not [name for name in metrics if "rollout_is" in name or "rollout_rs" in name]


def test_weights_that_are_all_0_have_no_effective_size():
    documents = nasty_documents(0, infinite=False)
    metrics = named(
        documents, {"ratio": "token", "ratio_low": 1e6, "ratio_high": 1e7, "outside": "zero", "normalize": True}
    )
    assert math.isnan(metrics["rollout_corr/rollout_is_eff_sample_size"])
    assert metrics["rollout_corr/rollout_is_batch_norm_factor"] == 1.0
