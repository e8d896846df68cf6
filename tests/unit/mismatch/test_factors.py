import pytest
import torch

from tests.helpers.gaps import computation, recorded, records
from workbench.mismatch.configuration import Configuration
from workbench.mismatch.factors import (
    BY_NAME,
    FACTORS,
    State,
    as_near,
    distance,
    fitted_temperature,
    fitted_truncation,
    score,
)


def state(own, configuration, values_T=None):
    values_T = recorded(own) if values_T is None else values_T
    return State(own, configuration, values_T, own.column(configuration))


def test_all_thirteen_are_there_and_no_two_own_a_field():
    assert len(BY_NAME) == len(FACTORS) == 13
    fields = [name for factor in FACTORS for name in factor.fields]
    assert len(fields) == len(set(fields))
    assert set(fields) == set(Configuration.__dataclass_fields__)


def test_every_proposal_changes_only_the_fields_of_its_factor():
    own = computation(records(source="tiny-qwen3-moe"), model="tiny-qwen3-moe", older={"old": "tiny-qwen3-moe"})
    view = state(own, Configuration(temperature=0.8, top_k=5))
    for factor in FACTORS:
        switches = list(factor.propose(view))
        assert all({name for name, _ in s.changes} <= {*factor.fields, "head"} for s in switches), factor.name
        assert all(view.configuration.with_changes(s.changes) != view.configuration for s in switches), factor.name
        assert switches or factor.name in ("LoRA merge", "tokenisation"), factor.name


def test_a_temperature_is_fitted_and_rounded():
    own = computation(records(temperature=0.85))
    assert fitted_temperature(state(own, Configuration())) == 0.85


@pytest.mark.parametrize(("name", "value"), [("top_k", 6), ("top_p", 0.8), ("min_p", 0.1)])
def test_a_truncation_is_fitted(name, value):
    own = computation()
    values_T = own.column(Configuration(**{name: value}))
    found = dict(fitted_truncation(state(own, Configuration(), values_T)))
    reached = own.column(Configuration(**{name: found[name]}))
    assert torch.equal(reached, values_T)


def test_distance_is_floored_and_leaves_out_what_has_no_value():
    column_T, nothing = torch.tensor([-1.0, -1.0, torch.nan]).double(), torch.tensor([-1.0, -2.0, -1.0]).double()
    counted_T = torch.tensor([True, True, True])
    assert distance(column_T, nothing, counted_T).isnan().tolist() == [False, False, True]
    assert score(column_T, nothing, torch.tensor([True, False, True])) == pytest.approx(-13.8, abs=0.1)
    assert score(column_T, nothing, torch.tensor([False, False, True])) == float("inf")


@pytest.mark.parametrize("seed", range(4))
def test_a_temperature_in_noise_has_no_more_digits_than_the_noise_leaves(seed):
    """The best of many temperatures hits single tokens: 1.0103 was fitted to 96 of them, and told as a cause."""
    own = computation(records(temperature=1.0))
    generator = torch.Generator().manual_seed(seed)
    values_T = own.column(Configuration())
    noisy_T = values_T + 0.014 * torch.randn(values_T.shape, generator=generator, dtype=torch.float64)
    assert fitted_temperature(state(own, Configuration(temperature=0.8), noisy_T)) == 1.0


def test_a_distance_is_as_near_within_five_per_cent_or_within_chance():
    best_T = torch.zeros(100)
    assert as_near(best_T + 0.04, best_T)
    assert not as_near(best_T + 0.06, best_T)
    hits_T = torch.zeros(100)
    hits_T[:3] = 9.0  # three tokens that the best one hits by chance
    assert as_near(hits_T, best_T)
    assert not as_near(torch.full((100,), torch.nan), best_T)
