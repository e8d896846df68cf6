"""Scaling contracts multiply into the weights the factors of a trainer and its engine."""

import pytest
import torch

from workbench.errors import SpecError
from workbench.reduction.denominators import GivenCounts
from workbench.reduction.scaling import StepLayout, scaling_factor
from workbench.reduction.weights import step_weights
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.targets import shift_targets
from workbench.specs.losses import LossSpec, ScalingSpec


def rows(*lengths):
    """A row for each tuple of trained tokens of its documents."""
    return [
        shift_targets(
            RolloutBatch.from_documents(
                [
                    {
                        "tokens": [1] * (n + 1),
                        "loss_mask": [0] + [1] * n,
                        "advantages": 1.0,
                        "old_logprobs": [-1.0] * (n + 1),
                    }
                    for n in row
                ]
            )
        )
        for row in lengths
    ]


def first_weights(lengths, scaling, given=None, cut=None, **loss):
    weights, _ = step_weights(rows(*lengths), LossSpec(compat={"scaling": scaling}, **loss), given, cut)
    return [float(named["policy"].gradient_T.max()) for named in weights]


def test_an_empty_contract_has_factor_one_in_every_layout():
    assert scaling_factor(ScalingSpec(), dp=2, cp=3, micro_batches=5) == 1
    assert ScalingSpec().breaks == ()


def test_names_are_sizes():
    scaling = ScalingSpec(
        multiplied_by=("dp", "micro_batches"),
        engine_multiplies=("cp",),
        divided_by=("cp",),
        engine_divides=("dp_cp",),
        replicated=True,
    )
    assert scaling_factor(scaling, dp=2, cp=3, micro_batches=5) == pytest.approx(2 * 5 * 3 * 3 / (3 * 6))
    assert scaling_factor(scaling, dp=2, cp=3, micro_batches=5, engine=False) == pytest.approx(10 / 3)
    assert scaling.powers == {"dp": 0, "cp": 0, "micro_batches": 1}


def test_an_uncancelled_factor_breaks_an_invariant():
    assert ScalingSpec(engine_divides=("dp_cp",)).breaks == ("dp", "cp")
    assert ScalingSpec(engine_divides=("dp_cp",), multiplied_by=("cp", "dp")).breaks == ()
    assert ScalingSpec(counts="micro_batch").breaks == ("micro_batch", "packing", "dp")
    assert ScalingSpec(counts="pass").breaks == ("micro_batch", "packing", "dp")
    assert ScalingSpec(least_tokens=1).breaks == ("masked_rows",)
    assert LossSpec(compat={"scaling": {"engine_divides": ["cp"]}}).breaks == ("cp",)


def test_counts_are_those_of_the_step_of_a_pass_or_of_a_micro_batch():
    lengths, cut = [(3, 1), (2,), (5,), (4, 1)], StepLayout(dp=2)
    assert first_weights(lengths, ScalingSpec(), cut=cut) == pytest.approx([1 / 16] * 4)
    assert first_weights(lengths, ScalingSpec(counts="pass"), cut=cut) == pytest.approx([1 / 9, 1 / 7, 1 / 9, 1 / 7])
    assert first_weights(lengths, ScalingSpec(counts="micro_batch"), cut=cut) == pytest.approx(
        [1 / 4, 1 / 2, 1 / 5, 1 / 5]
    )


def test_a_mean_of_means_is_the_local_denominator():
    scaling = ScalingSpec(counts="micro_batch", divided_by=("micro_batches",), engine_divides=("dp",))
    lengths = [(3, 1), (2,), (5,), (4, 1)]
    local = first_weights(lengths, ScalingSpec(), denominator="local_token")
    assert first_weights(lengths, scaling, cut=StepLayout(dp=2)) == pytest.approx(local)


@pytest.mark.parametrize(("counts", "elsewhere"), [("step", 12), ("pass", 4), ("micro_batch", 1)])
def test_a_local_mean_counts_the_ranks_that_share_it(counts, elsewhere):
    given = GivenCounts(dp=4, micro_batches=3)
    result = first_weights([(3, 1)], ScalingSpec(counts=counts), given, denominator="local_token")
    assert result == pytest.approx([1 / (4 * elsewhere)])


def test_counts_that_are_given_win_and_leave_the_engine_out():
    scaling = ScalingSpec(multiplied_by=("dp",), divided_by=("micro_batches",), engine_divides=("dp_cp",))
    given = GivenCounts(tokens=40, documents=8, dp=4, cp=2, micro_batches=3)
    assert first_weights([(3, 1)], scaling, given) == pytest.approx([4 / 3 / 40])
    assert first_weights([(3, 1)], scaling, given, denominator="document_sum") == pytest.approx([4 / 3 / 8])


def test_epsilons_are_added_to_divisors():
    scaling = ScalingSpec(count_epsilon=0.5, length_epsilon=0.25)
    assert first_weights([(3, 1)], scaling) == pytest.approx([1 / 4.5])
    assert first_weights([(3,)], scaling, denominator="document") == pytest.approx([1 / (1.5 * 3.25)])
    assert first_weights([(3, 1)], scaling, denominator="document_sum") == pytest.approx([1 / 2.5])
    assert first_weights([(3, 1)], scaling, denominator="constant", denominator_constant=4) == pytest.approx([1 / 10])


def test_an_empty_document_may_count_as_a_token():
    assert first_weights([(3, 0, 1)], ScalingSpec(least_tokens=1)) == pytest.approx([1 / 5])
    assert first_weights([(3, 0, 1)], ScalingSpec(least_tokens=1), GivenCounts(tokens=4)) == pytest.approx([1 / 4])


def test_the_reported_loss_has_the_same_factor():
    weights, _ = step_weights(
        rows((2,)), LossSpec(compat={"scaling": {"engine_divides": ["dp_cp"]}}), step_layout=StepLayout(dp=1, cp=4)
    )
    assert float(weights[0]["policy"].loss_T.max()) == pytest.approx(1 / 8)
    assert torch.equal(weights[0]["policy"].loss_T, weights[0]["policy"].gradient_T)


def test_rows_are_shared_evenly():
    with pytest.raises(SpecError, match="3 rows on 2 data-parallel ranks"):
        StepLayout(dp=2).micro_batches(3)
