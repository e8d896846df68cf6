"""Corrections against the oracle on nasty batches, against numbers of other systems, and their promises."""

import math
import random
from dataclasses import replace

import pytest
import torch

from tests.helpers.loss_batches import flat, nasty_documents, packed
from tests.oracles.corrections import correction
from workbench.errors import SpecError
from workbench.losses.corrections import (
    M2_CUTOFF,
    MEAN_WEIGHT,
    apply_correction,
    correct,
    log_document_weight,
    on_counted_tokens,
    step_statistics,
    survivors,
    whole_row,
)
from workbench.losses.terms import LossInputs, Term
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.targets import shift_targets
from workbench.specs.losses import CORRECTIONS, CorrectionSpec

SPECS = (
    {kind: {"kind": kind} for kind in CORRECTIONS}
    | {
        "both bounds": {"ratio": "token", "ratio_low": 0.5, "ratio_high": 2.0},
        "zeroed mean": {"ratio": "document_mean", "ratio_low": 0.9, "ratio_high": 1.1, "outside": "zero"},
        "zeroed below only": {"ratio": "token", "ratio_low": 0.7, "outside": "zero"},
        "normalised documents": {"ratio": "document_mean", "ratio_high": 1.5, "normalize": True},
        "normalised after zeroing": {"ratio": "token", "ratio_high": 1.5, "outside": "zero", "normalize": True},
        "held weight": {"ratio": "document_sum", "log_clamp": 0.5, "ratio_high": 1.6},
        "held gate": {"gate": "k3", "gate_level": "document_sum", "gate_high": 0.06, "log_clamp": 0.2},
        "three gates": {
            "ratio": "token",
            "ratio_high": 2.0,
            "gate": "k1",
            "gate_low": -0.6,
            "gate_high": 0.5,
            "further_gates": (
                {"statistic": "k2", "level": "document_mean", "high": 0.8},
                {"statistic": "ratio", "low": 0.7},
            ),
        },
        "given": {"ratio": "given", "ratio_low": 0.4, "ratio_high": 1.5},
        "zeroed given": {
            "ratio": "given",
            "ratio_low": 0.4,
            "outside": "zero",
            "normalize": True,
            "mean_epsilon": 0.25,
        },
        "given of documents": {"ratio": "given_document_mean", "given_epsilon": 0.01},
        "normalised with an epsilon": {
            "ratio": "document_sum",
            "ratio_high": 1.5,
            "normalize": True,
            "mean_epsilon": 0.5,
        },
        "opsm against old": {"opsm_threshold": 0.05, "opsm_anchor": "old"},
        "everything": {
            "ratio": "token",
            "ratio_high": 4.0,
            "normalize": True,
            "gate": "k3",
            "gate_level": "document_mean",
            "gate_high": 2.0,
            "opsm_threshold": 0.5,
            "m2_threshold": 1.0,
        },
    }
    | {
        f"{gate} {level}": {"gate": gate, "gate_level": level, "gate_low": low, "gate_high": high}
        for level in ("token", "document_mean", "document_sum", "document_max", "document_min")
        for gate, low, high in (
            ("ratio", 0.8, 1.3),
            ("k1", -0.5, 0.4),
            ("k2", 0.01, 0.6),
            ("k3", None, 0.7),
            ("inverse_k3", 0.002, 0.7),
            ("binary_kl", 1e-4, 0.3),
            ("sampler_binary_kl", 1e-4, 0.3),
            ("total_variation", 0.01, 0.2),
        )
    }
    | {
        f"bounded beyond {gate}": {
            "ratio": ratio,
            "ratio_low": 0.9,
            "ratio_high": 1.2,
            "gate": gate,
            "gate_action": "truncate",
            "gate_level": level,
            "gate_high": high,
        }
        for gate, level, high, ratio in (("ratio", "document_sum", 1.5, "document_mean"), ("k2", "token", 0.3, "token"))
    }
)


def wanted(documents, spec):
    gathered = correction(
        documents,
        ratio=spec.ratio,
        low=spec.ratio_low,
        high=spec.ratio_high,
        outside=spec.outside,
        normalize=spec.normalize,
        gate=spec.gate,
        gate_level=spec.gate_level,
        gate_low=spec.gate_low,
        gate_high=spec.gate_high,
        opsm=spec.opsm_threshold,
        opsm_anchor=spec.opsm_anchor,
        m2=spec.m2_threshold,
        further=[(gate.statistic, gate.level, gate.low, gate.high) for gate in spec.further_gates],
        log_clamp=spec.log_clamp or math.inf,
        mean_epsilon=spec.mean_epsilon,
        given_epsilon=spec.given_epsilon,
        gate_action=spec.gate_action,
    )
    return [[(1.0, 0.0, False) if token is None else tuple(token) for token in tokens] for tokens in gathered]


def weighed_documents(seed, **more):
    """Nasty documents with weights that came with them, some of them 0."""
    rng, documents = random.Random(seed), nasty_documents(seed, **more)
    for document in documents:
        document["given"] = [
            rng.choice((0.0, rng.uniform(0.2, 2.5), rng.uniform(0.2, 2.5))) if counts else math.nan
            for counts in document["mask"]
        ]
    return documents


def weighed_row(documents, *, padding=3):
    given = [value for document in documents for value in document["given"]] + [math.nan] * padding
    return packed(documents, padding=padding, correction_weights_T=torch.tensor(given, dtype=torch.float64))


@pytest.mark.parametrize("settings", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize(("seed", "low", "high"), [(0, 1e-3, 1e3), (1, 0.6, 1.6), (2, 0.97, 1.03)])
def test_weights_and_verdicts_are_the_oracles(settings, seed, low, high):
    spec = CorrectionSpec(**settings)
    documents = weighed_documents(seed, low=low, high=high)
    _, inputs = weighed_row(documents)
    inputs = replace(inputs, statistics=step_statistics([inputs], spec))
    corrected = correct(inputs, spec)
    for column, actual in enumerate((corrected.raw_weights_T, corrected.weights_T, corrected.kept_T.double())):
        expected = flat([[float(token[column]) for token in tokens] for tokens in wanted(documents, spec)])
        expected[-3:] = 1.0 if column == 0 else 0.0  # padding
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)


def test_the_cases_above_keep_some_tokens_and_reject_some():
    verdicts = {}
    for name, settings in SPECS.items():
        spec = CorrectionSpec(**settings)
        kept = []
        for seed, low, high in ((0, 1e-3, 1e3), (1, 0.6, 1.6), (2, 0.97, 1.03)):
            documents = weighed_documents(seed, low=low, high=high)
            kept += [
                token[2]
                for tokens, document in zip(wanted(documents, spec), documents, strict=True)
                for token, counts in zip(tokens, document["mask"], strict=True)
                if counts
            ]
        verdicts[name] = (any(kept), not all(kept) or not spec.rejects)
    assert [name for name, (some_kept, some_lost) in verdicts.items() if not (some_kept and some_lost)] == []


@pytest.mark.parametrize("settings", SPECS.values(), ids=SPECS)
def test_nothing_of_a_correction_carries_a_gradient(settings):
    spec = CorrectionSpec(**settings)
    documents = weighed_documents(3, rubbish=False)
    policy_T, inputs = weighed_row(documents, padding=0)
    leaves = [policy_T] + [getattr(inputs, f"{name}_logprobs_T").requires_grad_() for name in ("old", "sampler")]
    inputs = replace(inputs, statistics=step_statistics([inputs], spec))
    values_T = policy_T * torch.arange(len(policy_T)).double()
    term = apply_correction(Term(values_T), inputs, spec)
    term.values_T.sum().backward()
    weights_T = correct(inputs, spec).weights_T
    assert not weights_T.requires_grad
    torch.testing.assert_close(
        leaves[0].grad,
        weights_T * torch.arange(len(policy_T)).double() if spec.acts else torch.arange(len(policy_T)).double(),
        rtol=0,
        atol=0,
    )
    assert [leaf.grad for leaf in leaves[1:]] == [None, None]


def test_a_rejected_token_contributes_exactly_zero():
    inputs = LossInputs(
        torch.zeros(3), torch.zeros(3), torch.ones(3), sampler_logprobs_T=torch.tensor([0.0, -9.0, 0.0])
    )
    values_T = torch.tensor([1.0, math.nan, 2.0], requires_grad=True)
    term = apply_correction(Term(values_T, coefficient=0.5), inputs, CorrectionSpec(kind="icepop"))
    term.values_T.sum().backward()
    assert term.values_T.tolist() == [1.0, 0.0, 2.0]
    assert values_T.grad.tolist() == [1.0, 0.0, 1.0]
    assert term.coefficient == 0.5


def test_extras_have_both_weights_and_keep_earlier_entries():
    mu = torch.tensor([0.0, math.log(3.0), math.log(0.1)], dtype=torch.float64)
    zero = torch.zeros(3, dtype=torch.float64)
    inputs = LossInputs(zero, mu, zero, sampler_logprobs_T=zero, loss_mask_T=torch.tensor([True, True, False]))
    term = apply_correction(Term(zero, extras={"mine": zero}), inputs, CorrectionSpec(kind="tis"))
    assert set(term.extras) == {"mine", "raw_weight", "bounded_weight", "applied_weight", "kept", "truncated", "passed"}
    assert term.extras["raw_weight"].tolist() == pytest.approx([1.0, 3.0, 1.0])
    assert term.extras["applied_weight"].tolist() == [1.0, 2.0, 0.0]
    assert term.extras["kept"].tolist() == [True, True, False]
    assert term.extras["truncated"].tolist() == [False, True, False]


def test_without_a_correction_the_term_is_untouched():
    _, inputs = packed(nasty_documents(0))
    term = Term(inputs.advantages_T)
    assert apply_correction(term, inputs, CorrectionSpec()) is term


def test_masked_values_change_nothing():
    spec = CorrectionSpec(**SPECS["everything"])
    results = []
    for rubbish in (True, False):
        documents = nasty_documents(4, low=0.5, high=2.0, rubbish=rubbish)
        if results:  # the same numbers on trained tokens, harmless ones elsewhere
            for document, other in zip(documents, nasty_documents(4, low=0.5, high=2.0), strict=True):
                for name in ("policy", "old", "sampler", "advantages"):
                    document[name] = [
                        v if counts else 0.0 for v, counts in zip(other[name], document["mask"], strict=True)
                    ]
        _, inputs = packed(documents)
        results.append(correct(replace(inputs, statistics=step_statistics([inputs], spec)), spec))
    torch.testing.assert_close(results[0].weights_T, results[1].weights_T, rtol=0, atol=0)
    assert torch.isfinite(results[0].raw_weights_T).all()


def test_sum_and_mean_over_a_document_are_two_weights():
    zero = torch.zeros(4, dtype=torch.float64)
    inputs = LossInputs(zero, zero + 0.1, zero, sampler_logprobs_T=zero)
    weights = {
        ratio: correct(inputs, CorrectionSpec(ratio=ratio)).weights_T[0].item()
        for ratio in ("document_sum", "document_mean")
    }
    assert weights == pytest.approx({"document_sum": math.exp(0.4), "document_mean": math.exp(0.1)})


def test_verdicts_do_not_depend_on_the_precision_of_the_run():
    """0.1 nats is not 0.1 in float32, but the difference of two float32 is the same in every run."""
    old, sampler = torch.tensor([-0.9, -5.1, -2.3]), torch.tensor([-1.0, -5.2, -2.4])
    spec = CorrectionSpec(kind="icepop", ratio_low=1.0, ratio_high=math.exp(0.1))
    single = LossInputs(old, old, torch.ones(3), sampler_logprobs_T=sampler)
    double = LossInputs(old.double(), old.double(), torch.ones(3).double(), sampler_logprobs_T=sampler.double())
    assert correct(single, spec).kept_T.tolist() == correct(double, spec).kept_T.tolist()
    assert correct(single, spec).weights_T.dtype == torch.float32


# ---- statistics of the step, survivors ---------------------------------------------------------------------------


def rows_of(documents, cut):
    return [packed(part)[1] for part in (documents[:cut], documents[cut:])]


@pytest.mark.parametrize(
    "settings", [SPECS["batch_normalized"], SPECS["normalised documents"], SPECS["everything"], {"m2_threshold": 0.2}]
)
def test_a_step_statistic_does_not_depend_on_the_split(settings):
    spec = CorrectionSpec(**settings)
    documents = nasty_documents(5, low=0.3, high=3.0)
    statistics = [step_statistics(rows_of(documents, cut), spec) for cut in (1, 4, 7)]
    statistics.append(step_statistics([packed(documents)[1]], spec))
    for other in statistics[1:]:
        assert other == pytest.approx(statistics[0], rel=1e-13)
    whole = wanted(documents, spec)
    rows = rows_of(documents, 4)
    weights_T = torch.cat([correct(replace(row, statistics=statistics[1]), spec).weights_T[:-3] for row in rows])
    expected_T = flat([[token[1] for token in tokens] for tokens in whole], padding=0)
    torch.testing.assert_close(weights_T, expected_T, rtol=1e-12, atol=0)


def test_a_micro_batch_statistic_depends_on_the_split_as_declared():
    documents = nasty_documents(5, low=0.3, high=3.0)
    for settings in ({"kind": "batch_normalized"}, {"m2_threshold": 0.2}):
        spec = CorrectionSpec(**settings, population="micro_batch")
        assert set(spec.breaks) == {"micro_batch", "packing", "dp", "cp"}
        assert CorrectionSpec(**settings).breaks == ()
        weights = [torch.cat([correct(row, spec).weights_T[:-3] for row in rows_of(documents, cut)]) for cut in (4, 7)]
        assert not torch.equal(*weights)


def test_a_missing_step_statistic_is_refused():
    _, inputs = packed(nasty_documents(0))
    with pytest.raises(SpecError, match="step_statistics"):
        correct(inputs, CorrectionSpec(kind="batch_normalized"))
    with pytest.raises(SpecError, match="correction/m2_cutoff"):
        correct(inputs, CorrectionSpec(kind="m2po"))


def test_m2_rejects_the_largest_until_the_mean_is_low_enough_and_equal_ones_together():
    mu = torch.tensor([0.125, -0.5, 0.5, 0.25, 4.0], dtype=torch.float64)
    zero = torch.zeros(5, dtype=torch.float64)
    inputs = LossInputs(zero, mu, zero, sampler_logprobs_T=zero)
    kept = {}
    for threshold in (3.4, 3.3, 0.14453125, 0.14, 0.0390625, 0.039, 0.015625, 0.015, 0.0):
        spec = CorrectionSpec(m2_threshold=threshold)
        statistics = step_statistics([inputs], spec)
        kept[threshold] = correct(replace(inputs, statistics=statistics), spec).kept_T.int().tolist()
    # Squares 1/64, 1/16, 1/4, 1/4, 16; means of the smallest 1, 2, 4, 5: 0.015625, 0.0390625, 0.14453125, 3.3156
    assert kept == {
        3.4: [1, 1, 1, 1, 1],
        3.3: [1, 1, 1, 1, 0],
        0.14453125: [1, 1, 1, 1, 0],
        0.14: [1, 0, 0, 1, 0],
        0.0390625: [1, 0, 0, 1, 0],
        0.039: [1, 0, 0, 0, 0],
        0.015625: [1, 0, 0, 0, 0],
        0.015: [0, 0, 0, 0, 0],
        0.0: [0, 0, 0, 0, 0],
    }


def test_a_step_in_which_nothing_trains_has_statistics_that_harm_nothing():
    spec = CorrectionSpec(kind="batch_normalized", m2_threshold=0.1)
    zero = torch.zeros(3)
    inputs = LossInputs(zero, zero, zero, sampler_logprobs_T=zero, loss_mask_T=torch.zeros(3).bool())
    statistics = step_statistics([inputs], spec)
    assert statistics == {MEAN_WEIGHT: 1.0, M2_CUTOFF: -math.inf}
    assert correct(replace(inputs, statistics=statistics), spec).weights_T.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "geometric_gate", "gate_low": 0.98, "gate_high": 1.02},
        {"kind": "sequence_mask", "ratio_high": 1.03},
        {"kind": "m2po", "m2_threshold": 0.002},
        {"gate": "k3", "gate_level": "document_max", "gate_high": 0.005},
        {
            "gate": "k3",
            "gate_high": 0.005,
            "further_gates": ({"statistic": "k1", "level": "document_sum", "high": 0.05},),
        },
    ],
)
def test_survivors_of_whole_rows_match_those_after_the_split(settings):
    """Each document once as part of a whole row, before any policy, and once in a training row of other neighbours."""
    spec = CorrectionSpec(**settings, denominator="survivors")
    documents = [
        {
            "tokens": [1] * len(d["mask"]),
            "loss_mask": [0, *d["mask"][1:]],
            "advantages": [1.0] * len(d["mask"]),
            "old_logprobs": torch.tensor(d["old"]).double(),
            "sampler_logprobs": torch.tensor(d["sampler"]).double(),
        }
        for d in nasty_documents(6, low=0.9, high=1.1, rubbish=False)
    ]
    batch = RolloutBatch.from_documents(documents)
    whole = [whole_row(shift_targets(batch.select(part))) for part in ([0, 1, 2, 3], [4, 5, 6, 7])]
    statistics = step_statistics(whole, spec)
    counted = sum(int(survivors(replace(row, statistics=statistics), spec).sum()) for row in whole)
    row = shift_targets(batch.select([7, 2, 4, 0, 6, 1, 5, 3]).pad_to(100))
    live = LossInputs(
        row.old_logprobs_T - 0.3,
        row.old_logprobs_T,
        row.advantages_T,
        row.sampler_logprobs_T,
        loss_mask_T=row.loss_mask_T,
        document_ids_T=row.document_ids_T,
        statistics=statistics,
    )
    kept = int(correct(live, spec).kept_T.sum())
    assert kept == counted
    assert 0 < counted < int(row.loss_mask_T.sum())


def test_gated_counts_tokens_with_weight_0_inside_the_gates():
    mu = torch.tensor([0.0, 2.0, 0.1, -3.0], dtype=torch.float64)
    zero = torch.zeros(4, dtype=torch.float64)
    inputs = LossInputs(zero, mu, -torch.ones(4).double(), sampler_logprobs_T=zero)
    spec = {"kind": "icepop", "ratio_high": 5.0, "gate": "k1", "gate_high": 1.0}
    assert survivors(inputs, CorrectionSpec(**spec, denominator="survivors")).tolist() == [True, False, True, False]
    gated = CorrectionSpec(**spec, opsm_threshold=-9.0, denominator="gated")
    assert survivors(inputs, gated).tolist() == [True, True, True, False]
    corrected = correct(inputs, gated)
    assert not corrected.kept_T.any()
    assert corrected.passed_T.tolist() == [True, True, True, False]
    assert corrected.bounded_weights_T.tolist() == pytest.approx([1.0, 0.0, math.exp(0.1), 0.0])


def test_missing_given_weights_are_refused():
    zero = torch.zeros(2)
    with pytest.raises(SpecError, match="no correction_weights in the batch"):
        correct(LossInputs(zero, zero, zero), CorrectionSpec(ratio="given"))


def test_older_tokens_are_rejected_and_survivors_are_known_before_the_split():
    zero = torch.zeros(3)
    inputs = LossInputs(zero, zero, torch.ones(3), zero, staleness_T=torch.tensor([0, 2, 3]))
    spec = CorrectionSpec(kind="tis", staleness_high=2, denominator="survivors")
    assert correct(inputs, spec).weights_T.tolist() == [1.0, 1.0, 0.0]
    assert survivors(inputs, spec).tolist() == [True, True, False]
    with pytest.raises(SpecError, match=r"no staleness\n(.|\n)*record versions"):
        correct(LossInputs(zero, zero, zero, zero), spec)


def test_survivors_of_the_live_policy_are_refused():
    _, inputs = packed(nasty_documents(0))
    with pytest.raises(SpecError, match="live policy"):
        survivors(inputs, CorrectionSpec(kind="opsm"))


def test_a_correction_without_sampler_logprobs_is_refused():
    zero = torch.zeros(3)
    with pytest.raises(SpecError, match="no sampler_logprobs"):
        correct(LossInputs(zero, zero, zero), CorrectionSpec(kind="tis"))


# ---- numbers of other systems ------------------------------------------------------------------------------------


def one_document(old, sampler):
    old = torch.tensor(old, dtype=torch.float64)
    return LossInputs(old, old, torch.ones_like(old), sampler_logprobs_T=torch.tensor(sampler, dtype=torch.float64))


LONG = (
    [
        -2.1669921875,
        -0.00390625,
        -0.146484375,
        -0.00390625,
        -3.009765625,
        -0.0498046875,
        -0.541015625,
        -0.2451171875,
        -0.0390625,
    ],
    [
        -2.171875,
        -0.0458984375,
        -0.109375,
        -0.0302734375,
        -2.51171875,
        -0.0546875,
        -0.560546875,
        -0.197265625,
        -0.00390625,
    ],
)


@pytest.mark.parametrize(
    ("settings", "old", "sampler", "weights"),
    [
        # verl 1dda039b, rollout_is "sequence", threshold 2.0
        ({"ratio": "document_sum", "ratio_high": 2.0}, *LONG, [0.594218719647012] * 9),
        (
            {"ratio": "document_sum", "ratio_high": 2.0},
            [-0.7763671875, -4.2919921875, -0.1796875],
            [-0.8173828125, -4.3828125, -0.228515625],
            [1.1980126543093097] * 3,
        ),
        # TRL 1.16.0, vllm_importance_sampling_mode "sequence_truncate", 0.9 to 1.1
        ({"ratio": "document_sum", "ratio_low": 0.9, "ratio_high": 1.1}, [-1.0126953125], [-0.875], [0.9]),
        (
            {"ratio": "document_sum", "ratio_low": 0.9, "ratio_high": 1.1},
            [-2.71484375, -2.9189453125, -0.9638671875, -0.228515625, -1.5302734375, -4.8837890625, -0.6708984375],
            [-2.744140625, -2.96484375, -0.94140625, -0.2275390625, -1.548828125, -4.8486328125, -0.7158203125],
            [1.0833717027831364] * 7,
        ),
        # TRL, "token_mask", 0.5 to 2
        (
            {"ratio": "token", "ratio_low": 0.5, "ratio_high": 2.0, "outside": "zero"},
            [-0.69140625, -3.2744140625, -1.3359375, -0.3623046875],
            [-0.69921875, -3.259765625, -1.3779296875, -0.458984375],
            [1.007843097206448, 0.985458328904506, 1.0428863311694745, 1.1015074904895412],
        ),
        # AReaL cbff54d6, sequence level: weights are geometric means, the gate looks at the largest ratio
        (
            {"ratio": "document_mean", "gate": "ratio", "gate_level": "document_max", "gate_high": 1.4},
            [-0.201171875, -2.3134765625, -0.341796875, -0.2255859375, -0.11328125, -0.037109375, -2.6787109375],
            [-0.1845703125, -2.302734375, -0.37109375, -0.00390625, -0.1396484375, -0.1279296875, -2.751953125],
            [0.9958234781706312] * 7,
        ),
    ],
)
def test_weights_are_those_of_other_systems(settings, old, sampler, weights):
    result = correct(one_document(old, sampler), CorrectionSpec(**settings)).weights_T
    torch.testing.assert_close(result, torch.tensor(weights, dtype=torch.float64), rtol=1e-12, atol=0)


def test_verls_seq_mean_k1_is_the_geometric_gate_with_reversed_bounds():
    """verl 1dda039b, rollout_rs "seq_mean_k1", threshold "0.95_1.05": it bounds sampler / old."""
    documents = [
        (
            [-0.00390625, -0.0888671875, -0.9638671875, -0.00390625, -1.0849609375, -0.935546875, -1.81640625],
            [-0.0390625, -0.0419921875, -0.9501953125, -0.0068359375, -1.0947265625, -0.9521484375, -1.8447265625],
            True,
        ),
        ([-3.8232421875], [-4.580078125], False),
        (
            [-2.501953125, -2.0849609375, -3.2509765625, -1.421875],
            [-2.51953125, -1.98828125, -3.2958984375, -0.037109375],
            False,
        ),
        (
            [-3.720703125, -0.2900390625, -0.00390625, -0.8330078125, -0.7177734375],
            [-3.6640625, -0.2734375, -0.00390625, -0.791015625, -0.697265625],
            True,
        ),
    ]
    by_ratio = CorrectionSpec(gate="ratio", gate_level="document_mean", gate_low=1 / 1.05, gate_high=1 / 0.95)
    by_k1 = CorrectionSpec(gate="k1", gate_level="document_mean", gate_low=math.log(0.95), gate_high=math.log(1.05))
    for old, sampler, kept in documents:
        for spec in (by_ratio, by_k1):
            assert correct(one_document(old, sampler), spec).kept_T.tolist() == [kept] * len(old)


def test_no_other_inputs_are_needed_and_shared_sums_are_requested():
    """A sequence-level weight uses `document_sums`, so documents that straddle ranks get their whole sum."""

    class Doubled:
        def document(self, values_T):
            return torch.full_like(values_T, 2 * float(values_T.sum()))

        segment = document

    zero = torch.zeros(2, dtype=torch.float64)
    inputs = LossInputs(
        zero, zero + 0.1, zero, sampler_logprobs_T=zero, sums=Doubled(), lengths_T=torch.tensor([4.0, 4.0])
    )
    weights = [
        correct(inputs, CorrectionSpec(ratio=ratio)).weights_T[0].item()
        for ratio in ("document_sum", "document_mean", "segment_mean")
    ]
    assert weights == pytest.approx([math.exp(0.4), math.exp(0.1), math.exp(0.1)])


# ---- weights that enter a sequence weight ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "log_weight"),
    [
        (
            {"ratio": "token", "ratio_high": 2.0, "outside": "zero"},
            lambda gaps: sum(gap if math.exp(gap) <= 2 else math.log(1e-8) for gap in gaps),
        ),
        (
            {"ratio": "token", "ratio_low": 0.7, "ratio_high": 1.4},
            lambda gaps: sum(min(max(gap, math.log(0.7)), math.log(1.4)) for gap in gaps),
        ),
        ({"ratio": "document_sum", "ratio_high": 3.0}, lambda gaps: min(sum(gaps), math.log(3))),
        ({"ratio": "document_mean"}, lambda gaps: sum(gaps) / len(gaps)),
    ],
)
def test_a_document_correction_adds_token_logs_and_counts_a_document_once(settings, log_weight):
    documents = nasty_documents(1, low=0.5, high=2.5)
    _, inputs = packed(documents)
    spec = CorrectionSpec(**settings, enters="sequence_weight")
    expected = []
    for document in documents:
        gaps = [o - s for o, s, m in zip(document["old"], document["sampler"], document["mask"], strict=True) if m]
        expected.append([log_weight(gaps) if m else 0.0 for m in document["mask"]])
    found_T = torch.where(inputs.loss_mask_T, log_document_weight(inputs, spec), 0.0)
    torch.testing.assert_close(found_T, flat(expected), rtol=1e-12, atol=1e-13)


def test_a_weight_that_enters_elsewhere_multiplies_nothing_and_gates_still_reject():
    documents = nasty_documents(1, low=0.5, high=2.5)
    _, inputs = packed(documents)
    entering = CorrectionSpec(
        ratio="token", ratio_high=1.2, outside="zero", enters="sequence_weight", opsm_threshold=0.0
    )
    gated = CorrectionSpec(opsm_threshold=0.0)
    result, expected = correct(inputs, entering), correct(inputs, gated)
    assert torch.equal(result.kept_T, expected.kept_T)
    assert torch.equal(result.weights_T, expected.kept_T.double())
    assert 0 < int(result.kept_T.sum()) < int(inputs.loss_mask_T.sum())


def test_an_unscored_token_is_neutral_only_on_request():
    old, sampler = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, math.nan, -0.5])
    inputs = LossInputs(torch.tensor([-1.0, -9.0, -0.5]), old, -torch.ones(3), sampler)
    neutral = {"unscored": "neutral"}
    assert correct(inputs, CorrectionSpec(ratio="token", **neutral)).weights_T.tolist() == pytest.approx(
        [math.exp(0.5), 1.0, 1.0]
    )
    assert correct(inputs, CorrectionSpec(ratio="document_sum", **neutral)).weights_T.tolist() == pytest.approx(
        [math.exp(0.5)] * 3
    )
    # The mean of sampler - policy is (-0.5 + 0 + 0) / 3: the middle token contributes nothing, and is one of three.
    kept = [
        correct(inputs, CorrectionSpec(opsm_threshold=threshold, **neutral)).kept_T.tolist()
        for threshold in (-0.16, -0.17)
    ]
    assert kept == [[True] * 3, [False] * 3]
    assert math.isnan(correct(inputs, CorrectionSpec(ratio="token")).weights_T[1])


def test_weights_of_a_whole_row_are_shared_by_the_tokens_that_count():
    weights_BT = torch.tensor([[2.0, 4.0, 1.0, 8.0], [0.0, math.nan, 1.0, 1.0], [3.0, 1.0, 1.0, 1.0]])
    counts_BT = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
    result = on_counted_tokens(weights_BT, counts_BT)
    assert result.tolist()[0] == pytest.approx([8.0, 8.0, 1.0, 1.0])  # 64 over two tokens
    assert result.tolist()[1] == pytest.approx([1e-8, 1.0, 1.0, 1.0])
    assert result.tolist()[2] == [1.0] * 4


@pytest.mark.parametrize(
    ("settings", "rule"), [({"enters": "sequence_weight"}, "enters: sequence_weight is about a weight; name its ratio")]
)
def test_a_weight_that_is_none_enters_nowhere(settings, rule):
    with pytest.raises(ValueError, match=rule):
        CorrectionSpec(**settings)


def test_an_unsampled_token_is_rejected_and_enters_no_document_ratio():
    zero = torch.zeros(5, dtype=torch.float64)
    sampler = torch.tensor([-0.5, 1.0, -1.5, -0.2, 1.0], dtype=torch.float64)
    inputs = LossInputs(
        zero - 1,
        zero - 1,
        zero + 1,
        sampler_logprobs_T=sampler,
        loss_mask_T=torch.tensor([True, True, True, False, True]),
        document_ids_T=torch.tensor([0, 0, 0, 0, 1]),
    )
    spec = CorrectionSpec(
        ratio="document_mean", unsampled="drop", gate="ratio", gate_level="document_min", gate_low=0.1
    )
    corrected = correct(inputs, spec)
    assert corrected.weights_T.tolist() == [1.0, 0.0, 1.0, 0.0, 0.0]  # (-0.5 + 0.5) / 2 = 0; of three it would not be
    assert corrected.kept_T.tolist() == [True, False, True, False, False]
    opsm = CorrectionSpec(opsm_threshold=0.1, unsampled="drop")  # mean of 0.5 and -0.5; of all three it is 0.67
    assert correct(replace(inputs, advantages_T=zero - 1), opsm).kept_T.tolist() == [True, False, True, False, False]
    taken = correct(inputs, CorrectionSpec(ratio="document_mean"))
    assert taken.weights_T[0].item() == pytest.approx(math.exp(-2 / 3), rel=1e-14)


def test_a_truncating_gate_reports_changed_weights():
    mu = torch.tensor([0.5, 0.1, -0.5], dtype=torch.float64)
    zero = torch.zeros(3, dtype=torch.float64)
    inputs = LossInputs(zero, mu, zero + 1, sampler_logprobs_T=zero, document_ids_T=torch.tensor([0, 0, 1]))
    spec = CorrectionSpec(
        ratio="token",
        ratio_low=0.8,
        ratio_high=1.2,
        gate="ratio",
        gate_level="document_max",
        gate_high=1.3,
        gate_action="truncate",
    )
    corrected = correct(inputs, spec)
    assert corrected.weights_T.tolist() == [1.2, math.exp(0.1), math.exp(-0.5)]
    assert corrected.truncated_T.tolist() == [True, False, False]
    assert corrected.kept_T.all()
