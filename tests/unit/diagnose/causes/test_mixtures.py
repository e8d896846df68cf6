"""Causes in mixtures of experts: gates, losses of routers, gradients of experts."""

import pytest
import torch

from tests.helpers.hand_records import METRICS, gradients, make_record, mixed, values
from workbench.diagnose.diagnosis import diagnose_records

OF_EXPERTS = ["model.layers.0.mlp.experts.down_proj", "model.layers.1.mlp.experts.down_proj"]
GATES = ["model.layers.0.mlp.gate.weight", "model.layers.1.mlp.gate.weight"]
EXTRA = {
    name: torch.linspace(-1, 2, 40, dtype=torch.float64) + number for number, name in enumerate(OF_EXPERTS + GATES)
}
ROUTERS = {"loss/router_balance": 0.5, "loss/router_z": 0.2, "router/load/max": 1.5, "router/zero_gates/share": 0.0}


def record(changes=None, metrics=None, context=None, **more):
    """A record of a mixture on two ep ranks, of six of dp x cp."""
    named = METRICS | ROUTERS | (metrics or {})
    return make_record({"ep": 2} | (context or {}), metrics=named, changes=EXTRA | (changes or {}), **more)


def without_router_losses(**more):
    return make_record({"ep": 2}, metrics=METRICS, changes=EXTRA | more)


def first(trusted, suspect):
    cause = diagnose_records(trusted, suspect).causes[0]
    return cause.name, " ".join(cause.evidence)


def test_gates_of_zero():
    """Log-probabilities differ as well: what the experts are for is lost."""
    suspect = record(
        mixed([""]), {"router/zero_gates/share": 0.25}, tokens=values(policy_logprobs=lambda p: p - 1), loss=0.4
    )
    name, evidence = first(record(), suspect)
    assert name == "zero_gates"
    assert "0.25 of the routes" in evidence


def test_losses_of_routers_over_other_tokens():
    assert (
        first(record(), record(mixed([""]), {"loss/router_balance": 0.4, "loss/router_z": 0.3}))[0] == "router_tokens"
    )


def test_loads_of_parts_of_the_step():
    name, evidence = first(record(), record(mixed([""]), {"loss/router_balance": 0.4}))
    assert name == "router_loads"
    assert "dp, cp, micro_batches" in evidence


@pytest.mark.parametrize("other", [{"loss/policy": 0.3}, {"router/load/max": 1.7}])
def test_other_terms_and_loads_speak_against_the_routers_own_losses(other):
    changed = {"loss/router_balance": 0.4} | other
    names = [cause.name for cause in diagnose_records(record(), record(mixed([""]), changed)).causes]
    assert not {"router_tokens", "router_loads"} & set(names)


@pytest.mark.parametrize(
    ("factor", "text"), [(2.0, "times the experts' ranks"), (3.0, "times the ranks with the same experts"), (7.0, "tp")]
)
def test_one_factor_of_all_experts(factor, text):
    name, evidence = first(record(), record({name: EXTRA[name] * factor for name in OF_EXPERTS}))
    assert name == "experts_scaled"
    assert text in evidence


def test_a_factor_without_a_name_is_weaker():
    cause = diagnose_records(record(), record({name: EXTRA[name] * 1.7 for name in OF_EXPERTS}))["experts_scaled"]
    assert cause.score == pytest.approx(0.6)


def test_parts_of_experts_that_count_again():
    again = {name: EXTRA[name] * 2 + torch.ones(40) * (number + 1) for number, name in enumerate(OF_EXPERTS)}
    assert first(record(), record(again))[0] == "experts_repeated"


def test_gates_of_a_ranks_own_experts():
    """The router of the highest layer and all below it are wrong; its experts are right."""
    wrong = {
        GATES[1]: EXTRA[GATES[1]] * 0.5 + 1,
        GATES[0]: EXTRA[GATES[0]] + 3,
        OF_EXPERTS[0]: EXTRA[OF_EXPERTS[0]] - 2,
    }
    wrong |= mixed(["embed", ".0.", "1.self_attn", "1.input_layernorm"])
    assert first(without_router_losses(), without_router_losses(**wrong))[0] == "gates_of_own_experts"


def test_without_experts_nothing_is_said_of_them():
    trusted, suspect = make_record(), make_record(changes={"lm_head.weight": gradients()["lm_head.weight"] * 2})
    names = {cause.name for cause in diagnose_records(trusted, suspect).causes}
    assert not {name for name in names if "expert" in name or "router" in name or "gates" in name}
