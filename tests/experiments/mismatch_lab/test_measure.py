"""The lab of corrections: what each discards of a gap by hand, effects against seeds, and one run of two steps."""

import pytest
import torch

from experiments.mismatch_lab import measure as lab
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.versions import with_versions
from workbench.specs.reading import merge
from workbench.specs.run import RunSpec


def batch():
    """Two documents of two trained tokens: one at the sampler's values, one with ratios of e^2 and e^-2."""
    documents = [
        {
            "tokens": [1, 2, 3],
            "loss_mask": [0, 1, 1],
            "advantages": advantage,
            "old_logprobs": [0.0, -3.0, -3.0],
            "sampler_logprobs": [0.0, -3.0 - gap, -3.0 + gap],
        }
        for advantage, gap in ((1.0, 0.0), (-1.0, 2.0))
    ]
    return with_versions(RolloutBatch.from_documents(documents), torch.tensor([3, 3, 3, 1, 1, 1]), trained=3)


def test_what_each_correction_discards_of_a_gap_by_hand():
    rows = {row["name"]: row for row in lab.gap_rows(batch())}
    assert rows.keys() == lab.CORRECTIONS.keys()
    assert (rows["none"]["rejected_tokens"], rows["none"]["credit"], rows["none"]["effective_tokens"]) == (
        0.0,
        1.0,
        1.0,
    )
    e2, exact = float(torch.tensor(2.0).exp()), rows["importance_sampling"]
    assert exact["credit"] == pytest.approx((2 + e2 + 1 / e2) / 4)
    assert exact["cosine"] == pytest.approx(1.0)
    assert rows["tis"]["credit"] == pytest.approx((2 + 2 + 1 / e2) / 4)
    assert rows["tis"]["credit_unlikelier"] == pytest.approx((2 + 1 / e2) / 2)
    assert rows["icepop"]["rejected_tokens"] == 0.5  # both ratios are outside 0.5 to 5
    assert rows["icepop"]["credit_likelier"] == 1.0
    assert rows["staleness_gate"]["rejected_documents"] == 0.5
    assert rows["geometric_gate"]["rejected_tokens"] == 0.0  # a geometric mean of 1
    assert rows["sequence_tis_sum"]["credit"] == pytest.approx(1.0)
    assert rows["rejection"]["rejected_documents"] == 0.5


def seeds(*rewards):
    keys = ("right", "start", "gap_k3_nats", "kept", "weight", "gradient_norm")
    return [{"reward": reward, **dict.fromkeys(keys, 1.0)} for reward in rewards]


@pytest.mark.parametrize(
    ("rewards", "effect", "seen"),
    [((0.5, 0.6, 0.7), 0.2, True), ((0.35, 0.45, 0.55), 0.05, False), ((0.8, 0.8, 0.45), 0.35 - 1 / 15, False)],
)
def test_an_effect_is_seen_if_it_has_one_sign_and_is_larger_than_the_spread(rewards, effect, seen):
    row = lab.online_row("dense", "tis", seeds(*rewards), seeds(0.3, 0.4, 0.5))
    assert row["spread"] == pytest.approx(0.1)
    assert row["effect"] == pytest.approx(effect)
    assert row["seen"] is seen


@pytest.mark.parametrize(
    ("model", "name"), [(m, n) for m, configurations in lab.ONLINE.items() for n in configurations]
)
def test_every_configuration_is_a_run(model, name):
    spec = RunSpec.model_validate(merge(lab.BASES[model], lab.ONLINE[model][name]))
    assert spec.online.on
    assert spec.sync.asynchronous == (model == "dense" and name != "synchronous")


def test_finished_runs_are_taken_again(tmp_path):
    small = merge(lab.ONLINE["mixture"]["tis"], {"online": {"prompts": 2, "max_new_tokens": 3}})
    first, second = (lab.finished(tmp_path, "one", lab.MIXTURE, small, steps=2, seed=1) for _ in range(2))
    assert first.path == second.path
    numbers = lab.of_run(first)
    assert 0 < numbers["reward"] < 1
    assert 0 < numbers["gap_k3_nats"] < 0.01
    assert numbers["kept"] == 1.0
