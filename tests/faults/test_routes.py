"""Effects of faults of replayed routes and of the losses of routers, in their declared numbers."""

import pytest

from tests.helpers.planted_faults import shown

SHARE, BALANCE, LOAD = "router/disagreement/share", "loss/router_balance", "router/load/max"


def test_routes_that_are_not_replayed_agree_with_every_router():
    pair = shown("routes_not_replayed", routing={"replay": "recorded"})
    assert pair.right.numbers[SHARE] > 0.3
    assert pair.wrong.numbers[SHARE] == 0
    assert abs(pair.ratio("loss/total") - 1) > 1e-6


def test_routes_of_another_layer_exchange_the_loads_of_mixtures():
    pair = shown("routes_of_another_layer")
    assert pair.wrong.numbers[LOAD] == pair.right.numbers[LOAD]
    assert pair.wrong.numbers[SHARE] > 0.3
    assert pair.wrong_gradients


def test_shifted_routes_are_those_of_the_token_before():
    pair = shown("routes_shifted_by_one")
    assert pair.wrong.numbers[SHARE] != pair.right.numbers[SHARE]
    apart_S = (pair.wrong.tokens["policy_logprobs"] - pair.right.tokens["policy_logprobs"]).abs()
    assert float((apart_S > 1e-9).double().mean()) > 0.5


def test_gates_of_drifted_routes_are_zero():
    """Where a token's replayed experts are its own, nothing changes; of the others, output and gradient are lost."""
    pair = shown("gates_of_drifted_routes_zero")
    assert pair.cosine < 0.999
    assert pair.factor_of("mlp.experts.down_proj") < 1


def test_loads_of_ranks_balance_another_loss():
    pair = shown("balance_of_own_tokens")
    assert pair.ratio(BALANCE) > 1.001, "loads of fewer tokens are more uneven"
    wrong = [key for key in pair.wrong_numbers if key.startswith("loss/")]
    assert sorted(wrong) == [BALANCE, "loss/total"]


@pytest.mark.parametrize("cp", [2, 3])
def test_router_losses_count_a_cp_th(cp):
    pair = shown("router_gradient_over_cp", layout={"cp": cp})
    without = shown("router_gradient_over_cp", layout={"cp": cp}, routing={"balance": 0.0, "record": True}).right
    for name, right in pair.right.gradients.items():
        added = right - without.gradients[name]
        kept = pair.wrong.gradients[name] - without.gradients[name]
        assert float((kept - added / cp).norm()) <= 1e-10 * float(right.norm()) + 1e-14, name


@pytest.mark.parametrize("cp", [2, 3])
def test_router_losses_count_the_tokens_of_all_ranks(cp):
    pair = shown("router_gradient_times_cp", layout={"cp": cp})
    without = shown("router_gradient_times_cp", layout={"cp": cp}, routing={"balance": 0.0, "record": True}).right
    for name, right in pair.right.gradients.items():
        added = right - without.gradients[name]
        kept = pair.wrong.gradients[name] - without.gradients[name]
        assert float((kept - added * cp).norm()) <= 1e-10 * float(right.norm()) + 1e-14, name
