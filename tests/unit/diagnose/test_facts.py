"""The facts about the first differing step that causes use."""

import pytest
import torch

from tests.helpers.hand_records import gradients, make_record, norms_alone, tokens
from workbench.diagnose.evidence import compare_records
from workbench.diagnose.facts import Facts, short
from workbench.diagnose.token_facts import fit


def facts(suspect, trusted=None):
    return Facts(compare_records(trusted or make_record(), suspect))


def test_backward_is_followed_from_the_top():
    layer0 = {name: values * 2 for name, values in gradients().items() if ".0." in name}
    top = {f"model.layers.1.self_attn.{name}.weight": gradients(5)["lm_head.weight"] for name in ("k_proj", "v_proj")}
    result = facts(make_record(changes=layer0 | top))
    assert result.top_off == {"k_proj", "v_proj"}
    assert result.above_right
    assert result.groups_off() == {"attention", "norm", "mlp"}


def test_metrics_are_used_without_tokens():
    metrics = {"logprob/policy/mean": -1.0, "tokens/trained/sum": 5.0}
    changed = facts(
        make_record(tokens={}, metrics=metrics | {"logprob/policy/mean": -1.5}), make_record(tokens={}, metrics=metrics)
    )
    assert changed.forward_same is False
    assert changed.mask_same is True
    assert facts(norms_alone(make_record())).forward_same is None


def test_a_whole_count_explains_a_factor():
    assert facts(make_record(scale=130 / 149)).count_ratio == ("trained tokens", 130, 149)
    assert facts(make_record(scale=0.61803)).count_ratio is None
    assert facts(make_record()).count_ratio is None


def test_norms_of_a_part(right):
    result = facts(make_record(changes={"lm_head.weight": torch.zeros(40, dtype=torch.float64)}))
    assert result.without_gradient == ["lm_head.weight"]
    assert 0.9 < result.norm_factor < 1


@pytest.mark.parametrize(("far", "clear"), [(1.5, True), (0.35, False)])
def test_a_difference_barely_above_noise_does_not_stand_out(far, clear):
    bf16 = {"precision": "bfloat16"}
    noisy = {name: values * 1.2 for name, values in gradients().items()}
    other = {"lm_head.weight": gradients()["lm_head.weight"] * (1 + far)}
    result = facts(make_record(bf16, changes=noisy | other, tokens={}), make_record(bf16, tokens={}))
    assert list(result.off) == ["lm_head.weight"]
    assert result.clear == clear


def test_places_are_compared_with_the_whole_row():
    changed = tokens()
    changed["policy_logprobs"][11] -= 1
    assert facts(make_record(tokens=changed)).agree("behind shard edges", "policy_logprobs") == pytest.approx(1)
    everywhere = tokens()
    everywhere["policy_logprobs"] -= 1
    assert facts(make_record(tokens=everywhere)).agree("behind shard edges", "policy_logprobs") == 0
    assert facts(make_record(tokens=everywhere)).share_off("policy_logprobs") == 1


@pytest.mark.parametrize("shift", [1, -1])
def test_a_shift_of_distributions_is_looked_for_among_neighbours_that_both_train(shift):
    """Two tokens in the middle of each of six documents of four; other recorded values are of no distribution."""
    index, draw = torch.arange(24), torch.Generator().manual_seed(3)
    policy, entropy, other = torch.rand(3, 24, generator=draw, dtype=torch.float64)
    trained = torch.isin(index % 4, torch.tensor([1, 2]))
    right = {
        "documents": index // 4,
        "positions": index % 4,
        "trained": trained,
        "rows": 0 * index,
        "places": index - 1,
        "shards": 0 * index,
        "policy_logprobs": -policy,
        "old_logprobs": -policy,
        "entropy_nats": entropy,
        "losses": policy,
    }
    both = trained & trained.roll(shift)
    assert int(both.sum()) == 6
    moved = right | {"policy_logprobs": -policy.flip(0), "entropy_nats": torch.where(both, entropy.roll(shift), other)}
    assert facts(make_record(tokens=moved), make_record(tokens=right)).distributions_shifted == shift
    unmoved = right | {"policy_logprobs": -policy.flip(0), "entropy_nats": torch.where(both, other, entropy)}
    assert facts(make_record(tokens=unmoved), make_record(tokens=right)).distributions_shifted is None


@pytest.mark.parametrize(
    ("factor", "own", "said"), [(7.0, True, 7.0), (1.0, True, None), (7.0, False, None), (0.0, True, None)]
)
def test_the_common_factor_excludes_a_differing_embedding(factor, own, said):
    changes = {"model.embed_tokens.weight": gradients(9)["model.embed_tokens.weight"]} if own else {}
    result = facts(make_record(scale=factor, changes=changes)).all_but_embedding_scaled
    assert result == (said if said is None else pytest.approx(said))


@pytest.mark.parametrize(("first", "positions", "share"), [(1, True, 1.0), (1, False, 4 / 5), (2, True, 3 / 4)])
def test_isolated_tokens_need_not_change(first, positions, share):
    """The token at position 1 predicts its successor from one other token; positions may or may not be recorded."""
    index = torch.arange(12)
    laid = {name: values[:12] for name, values in tokens().items() if positions or name != "positions"} | {
        "trained": index % 6 > 0
    }
    moved = laid | {"policy_logprobs": laid["policy_logprobs"] - torch.where(index % 6 == first, 0.0, 1.0)}
    assert facts(make_record(tokens=moved), make_record(tokens=laid)).share_moved == pytest.approx(share)


def test_a_line_through_the_origin():
    x = torch.tensor([1.0, 2.0, -3.0])
    assert fit(x, 2 * x) == pytest.approx((2, 0))
    assert fit(x, torch.tensor([2.0, -1.0, 0.0]))[1] == pytest.approx(1)
    assert fit(x, torch.zeros(3)) == (0, 1)


def test_the_module_of_a_parameter():
    assert short("model.layers.0.self_attn.q_proj.weight") == "q_proj"
    assert short("scale") == "scale"
