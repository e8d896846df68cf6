"""What a loss may ask for where only counts of the step are known; the weights themselves against plain divisions."""

from __future__ import annotations

import pytest
import torch

from workbench.errors import SpecError
from workbench.parallel_loss.align import align_loss
from workbench.parallel_loss.documents import Documents
from workbench.parallel_loss.policy_loss import (
    DENOMINATORS,
    StepCounts,
    check_inputs_used,
    check_spec,
    local_policy_loss,
)
from workbench.sharding.mesh import Axis
from workbench.specs.losses import LossSpec

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
def test_a_token_is_divided_by_what_the_denominator_says(denominator, divisors):
    more = {"denominator_constant": 24.0} if denominator == "constant" else {}
    spec = LossSpec(name="reinforce", denominator=denominator, **more)
    policy = torch.linspace(-2, -1, 7, dtype=torch.float64)
    advantages = torch.arange(1.0, 8.0, dtype=torch.float64)
    documents = Documents(IDS, 2, Axis("cp"))
    loss = local_policy_loss(
        spec,
        {"policy_logprobs": policy, "old_logprobs": policy, "advantages": advantages},
        MASK,
        documents,
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
        mask,
        Documents(IDS, 2, Axis("cp")),
        torch.tensor([float(tokens), 0.0]),
        StepCounts(torch.tensor(tokens), torch.tensor(documents)),
    )
    assert loss.item() == tokens * 1.5 * 2


@pytest.mark.parametrize(
    "settings",
    [
        {"denominator": "prompt_group"},
        {"denominator": "local_token"},
        {"documents_counted": "all", "denominator": "document"},
        {"correction": {"kind": "icepop", "ratio_high": 3.0, "denominator": "survivors"}},
        {"scaling": {"multiplied_by": ["cp"]}},
        {"scaling": {"count_epsilon": 1e-8}},
        {"gradient_divisor": 2.0},
        {"normalize_by_documents": True, "denominator": "document_sum"},
        {"truncated": "silent"},
        {"top_entropy_share": 0.5},
    ],
)
def test_what_counts_do_not_say_is_refused(settings):
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
            MASK,
            Documents(IDS, 2, Axis("cp")),
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
def test_what_no_term_looks_at_is_refused_by_name(settings, used):
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


def test_the_loss_of_a_trainer_refuses_what_it_does_not_look_at():
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
