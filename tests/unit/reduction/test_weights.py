"""Weights of a step: those of the formulas, whatever rows it is cut into."""

from dataclasses import replace

import pytest
import torch

from tests.oracles.weights import document_weight, gradient_weight
from workbench.errors import SpecError
from workbench.reduction.denominators import DENOMINATORS
from workbench.reduction.weights import LOSS_WEIGHTS, StepTotals, TokenWeights, step_weights
from workbench.rollouts.batch import Extension, RolloutBatch
from workbench.rollouts.packing import pack
from workbench.rollouts.targets import shift_targets
from workbench.specs.losses import LossSpec

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
