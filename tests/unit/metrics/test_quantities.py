import math

import pytest
import torch

from workbench.losses.terms import LossInputs, Term
from workbench.metrics.policy import Quantities
from workbench.metrics.quantities import (
    KL,
    Advantage,
    Clip,
    ClipRule,
    Cut,
    DocumentSlots,
    Dropped,
    Entropy,
    Extra,
    JensenShannon,
    LogProb,
    LogRatio,
    NoGradient,
    NonFinite,
    One,
    PolicyCut,
    Ratio,
    SampledEntropy,
    TermValue,
    Truncated,
    beyond,
    clip_rule,
)
from workbench.specs.losses import LossSpec

INF = math.inf


def quantities(policy, old, *, advantages=None, mask=None, clip=None, terms=None, slots=None, **more):
    def tensor(values):
        return torch.tensor(values, dtype=torch.float32)

    inputs = LossInputs(
        tensor(policy),
        tensor(old),
        tensor(advantages or [1.0] * len(policy)),
        **{name: values if isinstance(values, torch.Tensor) else tensor(values) for name, values in more.items()},
    )
    mask_T = torch.tensor(mask or [1] * len(policy), dtype=torch.bool)
    return Quantities(inputs, terms or {}, mask_T, clip=clip, slots=slots)


def test_a_comparison_exists_where_both_log_probabilities_are_finite():
    q = quantities([-1.0, -INF, -INF, -2.0, 0.0], [-2.0, -1.0, -INF, -2.5, math.nan], mask=[1, 1, 1, 0, 1])
    assert q.population(Ratio("policy", "old")).tolist() == [True, False, False, False, False]
    assert q.population(LogProb("policy")).tolist() == [True, False, False, False, True]
    assert q.population(Advantage()).tolist() == [True, True, True, False, True]
    assert q.column(NonFinite()).tolist() == [0, 1, 1, 0, 1]


def test_an_infinite_log_probability_of_another_policy_takes_nothing_from_a_pair():
    q = quantities([-1.0, -1.0], [-1.0, -1.0], sampler_logprobs_T=[-1.0, -INF])
    assert q.population(Ratio("policy", "old")).tolist() == [True, True]
    assert q.population(Ratio("old", "sampler")).tolist() == [True, False]
    assert q.column(NonFinite()).tolist() == [0, 1]


def test_estimates_of_a_divergence_and_their_clamps():
    q = quantities([-1.0], [-3.0], ref_logprobs_T=[-31.0])
    d = 2.0  # log policy - log old, and KL(old || policy) has d = second - first
    assert float(q.column(KL("k1", "old", "policy"))) == -d
    assert float(q.column(KL("k2", "old", "policy"))) == d * d / 2
    assert float(q.column(KL("k3", "old", "policy"))) == pytest.approx(math.exp(d) - d - 1)
    assert float(q.column(KL("abs", "old", "policy"))) == d
    assert float(q.column(KL("k3", "policy", "old"))) == pytest.approx(math.exp(-d) + d - 1)
    assert float(q.column(KL("k1", "policy", "ref", input_limit=20.0))) == 20.0
    assert float(q.column(KL("k3", "policy", "ref", 20.0, 10.0))) == 10.0
    assert float(q.column(LogRatio("policy", "old"))) == d
    assert float(q.column(LogRatio("old", "policy", absolute=True))) == d
    assert float(q.column(LogRatio("policy", "ref", limit=20.0))) == 20.0


def test_ratios_plain_symmetric_and_clamped():
    q = quantities([0.0, 0.0], [math.log(2), -math.log(2)], clip=ClipRule(0.8, 1.2))
    assert q.column(Ratio("policy", "old")).tolist() == pytest.approx([0.5, 2.0])
    assert q.column(Ratio("policy", "old", symmetric=True)).tolist() == pytest.approx([2.0, 2.0])
    assert q.column(Ratio("policy", "old", clamped=True)).tolist() == pytest.approx([0.8, 1.2])
    assert quantities([0.0], [0.0]).column(Ratio("policy", "old", clamped=True)) is None


def test_divergence_from_the_mixture():
    p, s = 0.6, 0.1
    q = quantities([0.0], [math.log(p)], sampler_logprobs_T=[math.log(s)])
    k3 = [math.exp(d) - d - 1 for d in (math.log(p) - math.log(0.35), math.log(s) - math.log(0.35))]
    assert float(q.column(JensenShannon("old", "sampler"))) == pytest.approx(sum(k3) / 2)


def test_sampled_entropy_weighs_with_the_ratio():
    q = quantities([-1.0], [0.0], sampler_logprobs_T=[-2.0])
    assert float(q.column(SampledEntropy())) == pytest.approx(math.e)


@pytest.mark.parametrize(
    ("region", "expected"),
    [
        ("outside", [1, 1, 1, 1, 0, 1, 1]),
        ("outside_low", [0, 0, 1, 1, 0, 0, 1]),
        ("outside_high", [1, 1, 0, 0, 0, 1, 0]),
        ("cut", [1, 0, 0, 1, 0, 0, 0]),
        ("cut_low", [0, 0, 0, 1, 0, 0, 0]),
        ("cut_high", [1, 0, 0, 0, 0, 0, 0]),
        ("cut_dual", [0, 1, 0, 0, 0, 0, 0]),
    ],
)
def test_where_a_ratio_lies_and_without_an_advantage_nothing_is_cut(region, expected):
    ratio = torch.tensor([4.0, 4.0, 0.5, 0.5, 1.0, 4.0, 0.5])
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0, 0.0, 0.0])
    assert beyond(region, ratio, advantage, ClipRule(0.8, 1.2, 3.0)).int().tolist() == expected
    q = quantities(ratio.log().tolist(), [0.0] * 7, advantages=advantage.tolist(), clip=ClipRule(0.8, 1.2, 3.0))
    assert q.column(Clip(region)).tolist() == expected


def test_a_bound_is_inside():
    at = torch.tensor([0.8, 1.2], dtype=torch.float64)
    assert not beyond("outside", at, torch.ones(2), ClipRule(0.8, 1.2)).any()
    assert beyond("cut_dual", at, torch.ones(2), ClipRule(0.8, 1.2)) is None
    assert not beyond("cut_dual", torch.tensor(3.0), torch.tensor(-1.0), ClipRule(0.8, 1.2, 3.0))


def test_token_clips_are_unknown_where_the_ratio_is_a_documents():
    assert quantities([0.0], [0.0], clip=ClipRule(0.8, 1.2, None, True)).column(Clip("outside")) is None
    assert quantities([0.0], [0.0]).column(Clip("outside")) is None


def test_columns_of_the_policy_term():
    zeros = torch.zeros(4)
    term = Term(
        zeros,
        clipped_T=torch.tensor([True, False, False, False]),
        extras={
            "raw_weight": torch.tensor([1.0, 2.0, 3.0, 1.0]),
            "kept": torch.tensor([1, 1, 0, 1]).bool(),
            "applied_weight": torch.tensor([1.0, 1.5, 0.0, 1.0]),
        },
    )
    q = quantities([0.0] * 4, [0.0] * 4, advantages=[1.0, 1.0, 1.0, 0.0], terms={"policy": term})
    assert q.column(Cut("policy")).tolist() == [1, 0, 0, 0]
    assert q.column(NoGradient()).tolist() == [1, 0, 1, 1]
    assert q.column(Dropped()).tolist() == [0, 0, 1, 0]
    assert q.column(Truncated()).tolist() == [0, 1, 0, 0]
    assert q.column(Extra("raw_weight")).tolist() == [1, 2, 3, 1]
    nothing = quantities([0.0], [0.0])
    for column in (
        Cut("policy"),
        NoGradient(),
        Dropped(),
        Truncated(),
        Extra("kept"),
        Entropy(),
        LogProb("ref"),
        Ratio("old", "sampler"),
        KL("k1", "policy", "ref"),
        LogRatio("old", "sampler"),
        SampledEntropy(),
        JensenShannon("old", "sampler"),
    ):
        assert nothing.column(column) is None, column


def test_weights_of_documents_and_segments():
    ids, mask = torch.tensor([0, 0, 0, 0, 1, 1]), [1, 1, 0, 1, 1, 0]
    here = quantities([0.0] * 6, [0.0] * 6, mask=mask, document_ids_T=ids)
    assert (1 / here.weights("document")).tolist()[:4] == pytest.approx([3, 3, 3, 3])
    assert [1 / float(here.weights("segment")[t]) for t in (0, 1, 3, 4)] == [2, 2, 1, 1]
    unknown = quantities([0.0], [0.0])
    assert unknown.weights("document") is None
    assert unknown.weights("segment") is None
    given = quantities([0.0], [0.0], lengths_T=[5.0], slots=DocumentSlots(3, 9, torch.tensor([4.0])))
    assert float(given.weights("document")) == 0.2
    assert float(given.weights("segment")) == 0.25
    assert given.step_documents_T.tolist() == [3]
    assert given.column(One()).tolist() == [1]


def test_nothing_is_computed_twice_and_all_in_float64_without_a_gradient():
    policy = torch.zeros(3, requires_grad=True)
    q = Quantities(LossInputs(policy, torch.zeros(3), torch.zeros(3)), {}, torch.ones(3, dtype=torch.bool))
    first = q.column(KL("k3", "old", "policy"))
    assert q.column(KL("k3", "old", "policy")) is first
    assert first.dtype == torch.float64
    assert not first.requires_grad


@pytest.mark.parametrize(
    ("surrogate", "expected"),
    [
        ({"clip_low": 0.2, "clip_high": 0.28}, ClipRule(0.8, 1.28)),
        ({"dual_clip": 3.0, "delta": 2.0}, ClipRule(0.8, 1.2, 2.0)),
        ({"delta": 1.1}, ClipRule(0.8, 1.2, 1.2)),
        ({"kind": "cispo", "clip_high": 4.0}, ClipRule(-INF, 5.0)),
        ({"kind": "cispo", "clip_low": 0.5, "clip_high": 4.0, "bounds": "absolute"}, ClipRule(0.5, 4.0)),
        ({"kind": "gmpo", "clip_low": 0.4, "clip_high": 0.4}, ClipRule(math.exp(-0.4), math.exp(0.4))),
        ({"kind": "gspo", "clip_low": 0.1, "clip_high": 0.2}, ClipRule(0.9, 1.2, None, True)),
        ({"kind": "gspo", "level": "segment"}, None),
        (
            {"kind": "gspo", "clip_low": 0.1, "clip_high": 0.2, "dual_clip": 3.0, "delta": 2.0},
            ClipRule(0.9, 1.2, 2.0, True),
        ),
        ({"kind": "cispo", "clip_high": 4.0, "level": "document"}, ClipRule(-INF, 5.0, None, True)),
        ({"kind": "cispo", "clip_high": 4.0, "level": "segment"}, None),
        ({"kind": "luspo", "clip_low": 0.1, "clip_high": 0.2}, ClipRule(0.9, 1.2, None, True)),
        ({"kind": "ppo", "anchor": "sampler"}, ClipRule(0.8, 1.2, anchor="sampler")),
        ({"kind": "sapo"}, None),
    ],
)
def test_the_clip_of_a_surrogate(surrogate, expected):
    assert clip_rule(LossSpec(surrogate={"kind": "ppo"} | surrogate)) == expected
    assert clip_rule(None) is None


def test_a_terms_values_are_a_column_without_their_coefficient():
    known = quantities([0.0, 0.0], [0.0, 0.0], terms={"kl": Term(torch.tensor([1.0, 2.0], requires_grad=True), 0.1)})
    column = known.column(TermValue("kl"))
    assert (column.tolist(), column.requires_grad, known.column(TermValue("entropy"))) == ([1.0, 2.0], False, None)


def test_clipping_of_the_policy_term_and_the_dual_bound_are_separate():
    cut_T, dual_T = torch.tensor([True, True, False]), torch.tensor([False, True, False])
    terms = {"policy": Term(torch.zeros(3), clipped_T=cut_T, extras={"dual_clipped": dual_T})}
    q = quantities([0.0] * 3, [0.0] * 3, terms=terms)
    assert q.column(PolicyCut()).tolist() == [1.0, 0.0, 0.0]
    assert q.column(PolicyCut(dual=True)).tolist() == [0.0, 1.0, 0.0]
    never = quantities([0.0] * 3, [0.0] * 3, terms={"policy": Term(torch.zeros(3))})
    assert never.column(PolicyCut()).tolist() == [0.0, 0.0, 0.0]
    assert quantities([0.0], [0.0]).column(PolicyCut()) is None
