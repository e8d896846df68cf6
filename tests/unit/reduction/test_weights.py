"""Weights of a step: those of the formulas, whatever rows it is cut into."""

from dataclasses import replace

import pytest
import torch

from tests.helpers.batches import nasty_documents
from tests.oracles.weights import document_weight, gradient_weight
from workbench.errors import SpecError
from workbench.reduction.denominators import DENOMINATORS, GivenCounts
from workbench.reduction.weights import (
    LOSS_WEIGHTS,
    StepLayout,
    StepTotals,
    TokenWeights,
    compute_advantages,
    scaling_factor,
    step_weights,
)
from workbench.rollouts.batch import Extension, RolloutBatch
from workbench.rollouts.packing import pack
from workbench.rollouts.targets import shift_targets
from workbench.specs.losses import LossSpec, ScalingSpec
from workbench.specs.reading import parse_spec
from workbench.specs.run import RunSpec

MASKS = [[0, 1, 1, 1], [0, 0, 1], [0, 0], [0, 1, 0, 1, 1, 1], [0], [0, 1]]
GROUPS, ROLLOUTS, REWARDS = [7, 7, 2, 2, 9, 7], [5, 6, 6, 8, 1, 5], [1.0, 0.0, 1.0, 0.5, 0.0, -1.0]
DOCUMENTS = [
    {"tokens": [1] * len(m), "loss_mask": m, "group_id": g, "rollout_id": r, "reward": x}
    for m, g, r, x in zip(MASKS, GROUPS, ROLLOUTS, REWARDS, strict=True)
]


def make_batch(documents=DOCUMENTS):
    keys = ("tokens", "loss_mask", "group_id", "reward")
    batch = RolloutBatch.from_documents(
        [
            {key: d[key] for key in keys} | {"advantages": 1.0, "old_logprobs": [-1.0] * len(d["tokens"])}
            for d in documents
        ]
    )
    rollouts = Extension(torch.tensor([d["rollout_id"] for d in documents]), "document", "rollout index", "Whose.")
    return replace(batch, extensions={"rollout_ids": rollouts})


def rows(documents=DOCUMENTS, count=1):
    return [shift_targets(row) for row in pack(make_batch(documents), rows=count, multiple_of=4)]


def by_source(count=1, name="policy", which="loss_T", documents=DOCUMENTS, **settings):
    """Weight of each token of the batch, put where its target stands."""
    split = rows(documents, count)
    weights, _ = step_weights(split, LossSpec(**settings))
    result = torch.zeros(sum(len(d["tokens"]) for d in documents), dtype=torch.float64)
    for row, named in zip(split, weights, strict=True):
        weight_T = getattr(named[name], which)
        assert not weight_T[~row.loss_mask_T].any()
        result[row.source_T[row.loss_mask_T]] = weight_T[row.loss_mask_T]
    return result.tolist()


def expected(weight, documents=DOCUMENTS):
    return [
        weight(number) if trains else 0.0
        for number, document in enumerate(documents)
        for trains in document["loss_mask"]
    ]


SETTINGS = {name: {"denominator": name} for name in DENOMINATORS if name != "local_token"}
SETTINGS["constant"]["denominator_constant"] = 8.0


@pytest.mark.parametrize("counted", ["trained", "all"])
@pytest.mark.parametrize("denominator", SETTINGS)
def test_weights_are_those_of_the_formula_and_of_the_step_not_of_a_row(denominator, counted):
    settings = SETTINGS[denominator] | {"compat": {"documents_counted": counted}}
    truth = expected(lambda d: document_weight(DOCUMENTS, d, denominator, constant=8.0, documents_counted=counted))
    assert sum(truth) > 0
    for count in (1, 2, 3, 7):
        assert by_source(count, **settings) == pytest.approx(truth, rel=1e-15), count


def test_a_spec_offers_the_denominators_that_there_are():
    assert set(LossSpec.model_fields["denominator"].annotation.__args__) == set(DENOMINATORS)


def test_a_local_denominator_declares_its_broken_invariants_and_breaks_them():
    assert LossSpec(denominator="local_token").breaks == ("micro_batch", "packing", "dp")
    assert LossSpec(denominator="token").breaks == ()
    assert by_source(1, denominator="local_token") == by_source(1, denominator="token")
    assert by_source(3, denominator="local_token") != by_source(1, denominator="local_token")


def test_a_local_denominator_is_the_mean_over_rows_of_token_means():
    split = rows(count=3)
    ends = (torch.tensor([len(m) for m in MASKS]).cumsum(0) - 1).tolist()  # a document's last token is a target
    place = [next((n for n, row in enumerate(split) if end in row.source_T.tolist()), 0) for end in ends]
    assert len(set(place)) == 3
    truth = expected(lambda d: document_weight(DOCUMENTS, d, "local_token", rows=(place, 3)))
    assert by_source(3, denominator="local_token") == pytest.approx(truth, rel=1e-15)


def test_other_weights_are_there_by_name_under_any_denominator():
    weights, _ = step_weights(rows(), LossSpec(denominator="prompt_group"))
    assert set(weights[0]) == {
        "policy",
        "penalty",
        "token",
        "document",
        "document_sum",
        "raw",
        "local_token",
        "positive_token",
    }
    for name in ("token", "document", "document_sum", "raw", "positive_token"):
        truth = expected(lambda d, name=name: document_weight(DOCUMENTS, d, name))
        assert by_source(2, name=name, denominator="prompt_group") == pytest.approx(truth, rel=1e-15), name


def test_no_positive_document_gives_weights_of_zero():
    poor = [d | {"reward": -1.0} for d in DOCUMENTS]
    assert not any(by_source(name="positive_token", documents=poor))


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_divisor": 3.0},
        {"normalize_by_documents": True},
        {"gradient_divisor": 3.0, "normalize_by_documents": True},
    ],
)
@pytest.mark.parametrize("denominator", ["token", "document_sum"])
def test_the_gradient_may_be_divided_once_more_and_the_loss_is_not(denominator, changes):
    for count in (1, 3):
        loss = by_source(count, denominator=denominator, compat=changes)
        gradient = by_source(count, which="gradient_T", denominator=denominator, compat=changes)
        assert loss == by_source(1, denominator=denominator)
        truth = expected(lambda d: gradient_weight(DOCUMENTS, d, denominator, **changes))
        assert gradient == pytest.approx(truth, rel=1e-15)
        assert gradient != loss


def test_loss_over_m_with_gradient_over_m_squared():
    """The factor of ServiceNow/Fast-LLM#502: M documents, a gradient M times smaller than that of the loss."""
    loss = by_source(denominator="document_sum", compat={"normalize_by_documents": True})
    gradient = by_source(which="gradient_T", denominator="document_sum", compat={"normalize_by_documents": True})
    assert {w for w in loss if w} == {1 / 4}
    assert {w for w in gradient if w} == {1 / 16}


def test_one_tensor_serves_for_both_where_they_are_the_same():
    (weights,), _ = step_weights(rows(), LossSpec())
    assert weights["policy"].gradient_T is weights["policy"].loss_T
    moved = weights["policy"].map(lambda values_T: values_T.flip(0))
    assert moved.gradient_T is moved.loss_T
    two = TokenWeights(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])).map(lambda values_T: values_T.flip(0))
    assert (two.loss_T.tolist(), two.gradient_T.tolist()) == ([2.0, 1.0], [4.0, 3.0])


@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_a_step_without_trained_tokens_has_weight_zero(denominator):
    idle = [d | {"loss_mask": [0] * len(d["tokens"])} for d in DOCUMENTS]
    constant = 8.0 if denominator == "constant" else None
    spec = LossSpec(denominator=denominator, denominator_constant=constant, compat={"normalize_by_documents": True})
    weights, totals = step_weights(rows(idle, 2), spec)
    assert totals == StepTotals(0, 0)
    for named in weights:
        for pair in named.values():
            assert not pair.loss_T.any()
            assert not pair.gradient_T.any()
            assert torch.isfinite(pair.gradient_T).all()


def test_totals_are_those_of_the_step():
    _, totals = step_weights(rows(count=3), LossSpec())
    assert totals == StepTotals(tokens=9, documents=4)


def plain_rows():
    batch = RolloutBatch.from_documents(
        [{"tokens": [1, 1], "loss_mask": [0, 1], "advantages": 1.0, "old_logprobs": [0, -1.0]}]
    )
    return [shift_targets(batch)]


@pytest.mark.parametrize(
    ("denominator", "missing"),
    [("prompt_group", "group_ids"), ("group_length", "group_ids"), ("rollout", "the document extension rollout_ids")],
)
def test_a_denominator_without_its_field_is_refused(denominator, missing):
    with pytest.raises(SpecError, match=f"denominator = '{denominator}'\n  found: a batch without {missing}"):
        step_weights(plain_rows(), LossSpec(denominator=denominator))


def test_a_constant_denominator_without_its_constant_is_refused():
    with pytest.raises(SpecError, match=r"no loss\.denominator_constant"):
        step_weights(plain_rows(), LossSpec(denominator="constant"))


def test_a_constant_with_another_denominator_is_refused():
    with pytest.raises(ValueError, match="not used by the denominator 'token'"):
        LossSpec(denominator_constant=8.0)


def test_unknown_denominator_is_refused():
    with pytest.raises(SpecError, match="'sequence'"):
        step_weights([], LossSpec.model_construct(denominator="sequence"))


@pytest.mark.parametrize("denominator", ["token", "document", "document_sum"])
def test_only_the_policy_term_is_divided_by_survivors(denominator):
    documents = [
        {
            "tokens": [1] * 5,
            "loss_mask": [0, 1, 1, 1, 1],
            "advantages": 1.0,
            "reward": 1.0,
            "group_id": 0,
            "old_logprobs": [-1.0] * 5,
            "sampler_logprobs": [-1.0, -1.0, -1.0, -9.0, -9.0],
        },
        {
            "tokens": [1] * 3,
            "loss_mask": [0, 1, 1],
            "advantages": 1.0,
            "reward": 1.0,
            "group_id": 0,
            "old_logprobs": [-1.0] * 3,
            "sampler_logprobs": [-1.0, -9.0, -9.0],
        },
    ]
    row = shift_targets(RolloutBatch.from_documents(documents))
    results = {}
    for counted in ("original", "survivors"):
        spec = LossSpec(denominator=denominator, correction={"kind": "icepop", "denominator": counted})
        (results[counted],), _ = step_weights([row], spec)
    for name in set(results["original"]) - {"policy"}:  # their terms keep their values on rejected tokens
        torch.testing.assert_close(results["survivors"][name].loss_T, results["original"][name].loss_T, rtol=0, atol=0)
    torch.testing.assert_close(
        results["original"]["penalty"].loss_T, results["original"]["policy"].loss_T, rtol=0, atol=0
    )
    assert not torch.equal(results["survivors"]["policy"].loss_T, results["original"]["policy"].loss_T)
    assert float(results["survivors"]["positive_token"].loss_T.sum()) == pytest.approx(1.0)


def test_loss_weights_multiply_every_weight_of_a_target_and_no_count():
    split = rows()
    row, scale_T = split[0], torch.arange(len(split[0].loss_mask_T)) / 4.0
    weighed = replace(row, extensions=row.extensions | {LOSS_WEIGHTS: torch.where(row.loss_mask_T, scale_T, torch.nan)})
    (plain,), totals = step_weights([row], LossSpec())
    (result,), same = step_weights([weighed], LossSpec())
    assert totals == same
    for name, pair in result.items():
        torch.testing.assert_close(pair.loss_T, plain[name].loss_T * scale_T)
        torch.testing.assert_close(pair.gradient_T, plain[name].gradient_T * scale_T)


def test_an_epsilon_is_added_to_the_tokens_of_documents_with_a_reward_too():
    spec = LossSpec(compat={"scaling": {"count_epsilon": 0.5}})
    (plain,), _ = step_weights(rows(), LossSpec())
    (result,), _ = step_weights(rows(), spec)
    tokens = 1 / plain["positive_token"].loss_T.max()
    torch.testing.assert_close(result["positive_token"].loss_T.max(), 1 / (tokens + 0.5))


def test_documents_that_were_cut_off_weigh_nothing_and_stay_in_every_count():
    split = rows()
    cut = [replace(row, extensions={"truncated": (row.document_ids_T % 2 == 0).long()}) for row in split]
    for denominator in ("token", "document", "document_sum"):
        spec = LossSpec(denominator=denominator)
        (plain,), totals = step_weights(split, spec)
        (silent,), same = step_weights(cut, LossSpec(denominator=denominator, truncated="silent"))
        off_T = split[0].document_ids_T % 2 == 0
        for name in ("policy", "penalty"):
            assert (silent[name].loss_T[off_T] == 0).all()
            assert torch.equal(silent[name].loss_T[~off_T], plain[name].loss_T[~off_T])
        assert same == totals
        assert torch.equal(step_weights(cut, spec)[0][0]["policy"].loss_T, plain["policy"].loss_T)
    with pytest.raises(SpecError, match="a batch without the extension truncated"):
        step_weights(split, LossSpec(truncated="silent"))


def grouped():
    """The nasty documents in groups of three, with rewards."""
    return RolloutBatch.from_documents(
        [d | {"group_id": number // 3, "reward": float(number)} for number, d in enumerate(nasty_documents(4))]
    )


def spec_of(**settings):
    return RunSpec.model_validate(settings)


def test_a_penalty_in_the_reward_is_not_silently_dropped():
    settings = {"loss": {"kl": {"coefficient": 0.1, "placement": "reward"}}}
    with pytest.raises(SpecError, match=r"loss.kl.placement 'reward' with recorded advantages"):
        parse_spec(RunSpec, settings, where="settings")
    parse_spec(RunSpec, settings | {"data": {"advantages": {"name": "rloo"}}}, where="settings")
    parse_spec(RunSpec, {"loss": {"kl": {"coefficient": 0.0, "placement": "reward"}}}, where="settings")


def test_a_penalty_in_the_reward_moves_advantages_where_an_estimator_makes_them():
    batch = grouped()
    batch = replace(batch, ref_logprobs_T=batch.old_logprobs_T - 0.5)
    made = {}
    for coefficient in (0.0, 0.1):
        spec = spec_of(
            data={"advantages": {"name": "reinforce_plus_plus"}},
            loss={"kl": {"coefficient": coefficient, "placement": "reward", "estimator": "k1"}},
        )
        made[coefficient] = compute_advantages(batch, spec).advantages_T
    assert not torch.equal(made[0.0], made[0.1])
    spec = spec_of(data={"advantages": {"name": "grpo"}}, loss={"kl": {"coefficient": 0.1, "placement": "reward"}})
    with pytest.raises(SpecError, match="no ref_logprobs"):
        compute_advantages(replace(grouped(), ref_logprobs_T=None), spec)


def test_settings_of_the_estimator_are_handed_on_and_strange_ones_are_refused():
    batch = grouped()
    one, other = (
        compute_advantages(batch, spec_of(data={"advantages": {"name": "grpo", "settings": settings}}))
        for settings in ({"ddof": 1.0}, {"scale": "none"})
    )
    assert not torch.equal(one.advantages_T, other.advantages_T)
    with pytest.raises(SpecError, match="slope"):
        compute_advantages(batch, spec_of(data={"advantages": {"name": "rloo", "settings": {"slope": 1}}}))


def trained_rows(*lengths):
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
    weights, _ = step_weights(trained_rows(*lengths), LossSpec(compat={"scaling": scaling}, **loss), given, cut)
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
        trained_rows((2,)),
        LossSpec(compat={"scaling": {"engine_divides": ["dp_cp"]}}),
        step_layout=StepLayout(dp=1, cp=4),
    )
    assert float(weights[0]["policy"].loss_T.max()) == pytest.approx(1 / 8)
    assert torch.equal(weights[0]["policy"].loss_T, weights[0]["policy"].gradient_T)


def test_rows_are_shared_evenly():
    with pytest.raises(SpecError, match="3 rows on 2 data-parallel ranks"):
        StepLayout(dp=2).micro_batches(3)
