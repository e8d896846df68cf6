"""Losses that need only counts of the step; the weights themselves against plain divisions."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.aligned_ranks import on_ranks
from workbench.errors import ShapeError, SpecError
from workbench.parallel_loss.align import align_loss
from workbench.parallel_loss.policy_loss import (
    DENOMINATORS,
    StepCounts,
    check_inputs_used,
    check_spec,
    document_sums,
    local_policy_loss,
)
from workbench.sharding.mesh import Axis
from workbench.specs.losses import LossSpec

ALONE = Axis("cp")
MASK = torch.tensor([1, 1, 0, 1, 0, 0, 1], dtype=torch.bool)
IDS = torch.tensor([0, 0, 0, 1, 1, 1, 1])
COUNTS = StepCounts(torch.tensor(10), torch.tensor(4))
"""Of a step of which these tokens are a part."""


@pytest.mark.parametrize(
    ("denominator", "divisors"),
    [
        ("token", [10.0] * 4),
        ("document", [4 * 2.0, 4 * 2.0, 4 * 2.0, 4 * 2.0]),
        ("document_sum", [4.0] * 4),
        ("constant", [4 * 24.0] * 4),
        ("raw", [1.0] * 4),
    ],
)
def test_token_weights_follow_the_denominator(denominator, divisors):
    more = {"denominator_constant": 24.0} if denominator == "constant" else {}
    spec = LossSpec(name="reinforce", denominator=denominator, **more)
    policy = torch.linspace(-2, -1, 7, dtype=torch.float64)
    advantages = torch.arange(1.0, 8.0, dtype=torch.float64)
    loss = local_policy_loss(
        spec,
        {"policy_logprobs": policy, "old_logprobs": policy, "advantages": advantages},
        document_sums(MASK, IDS, 2, ALONE),
        torch.tensor([2.0, 2.0]),
        COUNTS,
    )
    trained = zip((policy * advantages)[MASK].tolist(), divisors, strict=True)
    assert loss.item() == pytest.approx(-sum(value / divisor for value, divisor in trained))
    assert denominator in DENOMINATORS


@pytest.mark.parametrize(("tokens", "documents"), [(1, 1), (0, 0)])
@pytest.mark.parametrize("denominator", ["token", "document", "document_sum"])
def test_one_token_is_the_whole_mean_and_nothing_is_divided_by_0(denominator, tokens, documents):
    mask = torch.tensor([bool(tokens), *[False] * 6])
    spec = LossSpec(name="reinforce", denominator=denominator)
    given = torch.full((7,), -1.5, dtype=torch.float64)
    loss = local_policy_loss(
        spec,
        {"policy_logprobs": given, "old_logprobs": given, "advantages": given + 3.5},
        document_sums(mask, IDS, 2, ALONE),
        torch.tensor([float(tokens), 0.0]),
        StepCounts(torch.tensor(tokens), torch.tensor(documents)),
    )
    assert loss.item() == tokens * 1.5 * 2


@pytest.mark.parametrize(
    "settings",
    [
        {"denominator": "prompt_group"},
        {"denominator": "local_token"},
        {"compat": {"documents_counted": "all"}, "denominator": "document"},
        {"correction": {"kind": "icepop", "ratio_high": 3.0, "denominator": "survivors"}},
        {"compat": {"scaling": {"multiplied_by": ["cp"]}}},
        {"compat": {"scaling": {"count_epsilon": 1e-8}}},
        {"compat": {"gradient_divisor": 2.0}},
        {"compat": {"normalize_by_documents": True}, "denominator": "document_sum"},
        {"truncated": "silent"},
        {"top_entropy_share": 0.5},
    ],
)
def test_denominators_beyond_counts_are_refused(settings):
    with pytest.raises(SpecError, match="from one rank's tokens"):
        check_spec(LossSpec(name="ppo", **settings))


@pytest.mark.parametrize("name", ["grpo", "gspo", "dapo", "cispo", "sapo", "luspo"])
def test_presets_pass(name):
    assert check_spec(LossSpec(name=name)) is None


def test_a_constant_must_be_given():
    with pytest.raises(SpecError, match=r"no loss\.denominator_constant"):
        local_policy_loss(
            LossSpec(name="dr_grpo"),
            {"policy_logprobs": torch.zeros(7), "old_logprobs": torch.zeros(7), "advantages": torch.zeros(7)},
            document_sums(MASK, IDS, 2, ALONE),
            torch.tensor([2.0, 2.0]),
            COUNTS,
        )


OPTIONAL = ("ref_logprobs", "sampler_logprobs", "entropy", "rewards")


@pytest.mark.parametrize(
    ("settings", "used"),
    [
        ({}, set()),
        ({"kl": {"coefficient": 0.1}}, {"ref_logprobs"}),
        ({"kl": {"coefficient": 0.1, "placement": "reward"}}, set()),
        ({"kl": {"coefficient": 0.1, "importance": "sampler"}}, {"ref_logprobs", "sampler_logprobs"}),
        ({"kl": {"coefficient": 0.1, "against": "sampler"}}, {"sampler_logprobs"}),
        ({"correction": {"kind": "icepop", "ratio_low": 0.5, "ratio_high": 3.0}}, {"sampler_logprobs"}),
        ({"correction": {"kind": "geometric_gate", "gate_low": 0.1, "gate_high": 9.0}}, {"sampler_logprobs"}),
        ({"surrogate": {"kind": "ppo", "anchor": "sampler"}}, {"sampler_logprobs"}),
        ({"entropy_coefficient": 0.01}, {"entropy"}),
        ({"positive_nll_coefficient": 0.1}, {"rewards"}),
        ({"signal": "rewards"}, {"rewards"}),
    ],
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),
)
def test_unused_inputs_are_refused_by_name(settings, used):
    spec = LossSpec(name="grpo", **settings)
    values = torch.full((3,), -1.0)
    for name in OPTIONAL:
        assert check_inputs_used(spec, {name: None}) is None
        if name in used:
            assert check_inputs_used(spec, {name: values}) is None
            continue
        with pytest.raises(SpecError, match=f"loss 'grpo' with {name}") as caught:
            check_inputs_used(spec, {name: values})
        assert caught.value.parts["rule"].startswith(f"{name}: ")


def test_a_trainers_loss_refuses_unused_inputs():
    zeros, mask = torch.zeros(4), torch.ones(4, dtype=torch.bool)
    with pytest.raises(SpecError, match="with ref_logprobs, entropy"):
        align_loss(engine="mean").policy_loss(
            "grpo",
            policy_logprobs=zeros,
            old_logprobs=zeros,
            advantages=zeros,
            mask=mask,
            ref_logprobs=zeros,
            entropy=zeros,
        )


# -- documents whose tokens lie on several ranks -------------------------------------------------------------------


def test_rows_are_documents_without_ids():
    result = document_sums(torch.ones(2, 3).bool(), None, None, ALONE)
    assert result.document_ids_T.tolist() == [0, 0, 0, 1, 1, 1]
    assert result.num_documents == 2
    assert document_sums(torch.ones(3).bool(), None, None, ALONE).document_ids_T.tolist() == [0, 0, 0]


def test_ids_are_counted_over_all_ranks():
    ids = [torch.tensor([0, 0, 1]), torch.tensor([1, 4, -1])]
    counts = on_ranks(lambda align, d, c: document_sums(ids[c] >= 0, ids[c], None, align.cp).num_documents, cp=2)
    assert counts == [5, 5]


@pytest.mark.parametrize(
    ("ids", "count"),
    [
        (torch.tensor([0, 1]), None),
        (torch.tensor([0.0, 1.0, 1.0]), None),
        (torch.tensor([True, True, False]), None),
        (torch.tensor([0, 1, 2]), 2),
    ],
)
def test_ids_that_are_none_are_refused(ids, count):
    with pytest.raises(ShapeError, match="documents"):
        document_sums(torch.ones(3).bool(), ids, count, ALONE)


def test_padding_may_have_any_negative_id_and_counted_tokens_may_not():
    ids, mask = torch.tensor([0, 1, -1]), torch.tensor([True, True, False])
    assert document_sums(mask, ids, None, ALONE).num_documents == 2
    with pytest.raises(ShapeError, match="below 0 on a token that counts"):
        document_sums(~mask, ids, None, ALONE)


VALUES = torch.tensor([[1.0, 2.0, float("nan"), 4.0], [5.0, 6.0, 7.0, 8.0]], dtype=torch.float64)
TRAINED = torch.tensor([[1, 1, 0, 1], [1, 0, 1, 1]], dtype=torch.bool)
NUMBERS = torch.tensor([[0, 1, 1, 1], [1, 1, 2, 2]])
CONSUMED = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]], dtype=torch.float64)
"""What each token wants from its document's sum."""


def summed(align, _, c):
    values = VALUES[c].clone().requires_grad_()
    sums = document_sums(TRAINED[c], NUMBERS[c], 3, align.cp).document(values)
    (sums * CONSUMED[c]).sum().backward()
    return sums.detach(), values.grad


def test_sums_and_gradients_are_those_of_the_whole_documents():
    first, second = on_ranks(summed, cp=2)
    assert torch.stack([first[0], second[0]]).tolist() == [[1.0, 11.0, 11.0, 11.0], [11.0, 11.0, 15.0, 15.0]]
    wanted = {0: 1.0, 1: 2.0 + 3 + 4 + 5 + 6, 2: 15.0}
    expected = [
        [wanted[int(i)] * bool(m) for i, m in zip(*row, strict=True)] for row in zip(NUMBERS, TRAINED, strict=True)
    ]
    assert torch.stack([first[1], second[1]]).tolist() == expected


def test_half_precision_is_added_up_in_float32():
    result = document_sums(torch.ones(600).bool(), None, None, ALONE)
    ones = torch.ones(600, dtype=torch.bfloat16)
    total = result.totals(ones)
    assert (total.item(), total.dtype) == (600.0, torch.float32)


@pytest.mark.parametrize("part", ["segment", "pair"])
def test_settings_that_need_whole_rows_are_refused(part):
    sums = document_sums(torch.ones(3).bool(), None, None, ALONE)
    with pytest.raises(SpecError, match="from one rank's tokens"):
        getattr(sums, part)(torch.ones(3))
    assert sums.document(torch.ones(3)).tolist() == [3.0, 3.0, 3.0]
