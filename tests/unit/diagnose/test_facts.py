"""The questions that causes ask of the first step that differs."""

import pytest
import torch

from tests.helpers.hand_records import gradients, make_record, norms_alone, tokens
from workbench.diagnose.evidence import compare_records
from workbench.diagnose.facts import Facts, fit, short


def facts(suspect, trusted=None):
    return Facts(compare_records(trusted or make_record(), suspect))


def test_what_flows_back_is_followed_from_the_top():
    layer0 = {name: values * 2 for name, values in gradients().items() if ".0." in name}
    top = {f"model.layers.1.self_attn.{name}.weight": gradients(5)["lm_head.weight"] for name in ("k_proj", "v_proj")}
    found = facts(make_record(changes=layer0 | top))
    assert found.top_off == {"k_proj", "v_proj"}
    assert found.above_right
    assert found.groups_off() == {"attention", "norm", "mlp"}


def test_without_tokens_metrics_answer():
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
    found = facts(make_record(changes={"lm_head.weight": torch.zeros(40, dtype=torch.float64)}))
    assert found.without_gradient == ["lm_head.weight"]
    assert 0.9 < found.norm_factor < 1


@pytest.mark.parametrize(("far", "clear"), [(1.5, True), (0.35, False)])
def test_what_barely_exceeds_the_noise_does_not_stand_out(far, clear):
    bf16 = {"precision": "bfloat16"}
    noisy = {name: values * 1.2 for name, values in gradients().items()}
    other = {"lm_head.weight": gradients()["lm_head.weight"] * (1 + far)}
    found = facts(make_record(bf16, changes=noisy | other, tokens={}), make_record(bf16, tokens={}))
    assert list(found.off) == ["lm_head.weight"]
    assert found.clear == clear


def test_places_are_held_against_everywhere():
    changed = tokens()
    changed["policy_logprobs"][11] -= 1
    assert facts(make_record(tokens=changed)).agree("behind shard edges", "policy_logprobs") == pytest.approx(1)
    everywhere = tokens()
    everywhere["policy_logprobs"] -= 1
    assert facts(make_record(tokens=everywhere)).agree("behind shard edges", "policy_logprobs") == 0
    assert facts(make_record(tokens=everywhere)).share_off("policy_logprobs") == 1


@pytest.mark.parametrize("shift", [1, -1])
def test_a_shift_of_distributions_is_looked_for_among_neighbours_that_both_train(shift):
    """Two tokens in the middle of each of six documents of four; what else is recorded is of no distribution."""
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
def test_the_factor_of_all_but_the_embedding_is_told_where_the_embedding_has_another(factor, own, said):
    changes = {"model.embed_tokens.weight": gradients(9)["model.embed_tokens.weight"]} if own else {}
    found = facts(make_record(scale=factor, changes=changes)).all_but_embedding_scaled
    assert found == (said if said is None else pytest.approx(said))


@pytest.mark.parametrize(("first", "positions", "share"), [(1, True, 1.0), (1, False, 4 / 5), (2, True, 3 / 4)])
def test_what_sees_itself_alone_need_not_move(first, positions, share):
    """The token at position 1 predicts what follows from one other alone; where it lies, positions say, or nobody."""
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
