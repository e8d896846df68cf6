"""Ways to divide a loss, and the possible meanings of a factor."""

import pytest
import torch

from tests.helpers.hand_records import CONTEXT, COUNTS, make_record, tokens
from workbench.diagnose.denominators import deals, names_of, reproduced, sizes, ways

TRAINED = tokens()["trained"]


def by_hand(labels):
    values = tokens()["losses"][TRAINED]
    means = [values[labels == label].mean() for label in labels.unique()]
    return float(torch.stack(means).mean()), float(torch.stack(means).sum())


def test_every_denominator_matches_its_description():
    results = {
        (way.kind, way.description.rpartition(", ")[2]): way.loss
        for way in ways(make_record().steps[0], CONTEXT | {"micro_batches": 1})
    }
    values = tokens()["losses"][TRAINED]
    assert results["", "all trained tokens of the step"] == pytest.approx(float(values.mean()))
    assert results["", "nothing"] == pytest.approx(float(values.sum()))
    assert results["", "all tokens and padding"] == pytest.approx(float(values.sum()) / 210)
    for kind, labels in (("documents", tokens()["documents"]), ("shards", tokens()["shards"])):
        mean, total = by_hand(labels[TRAINED])
        assert results[kind, "averaged"] == pytest.approx(mean)
        assert results[kind, "summed"] == pytest.approx(total)
    assert {kind for kind, _ in results} == {"", "documents", "shards"}, "one row, and no kind twice"


def test_means_over_ranks_are_told_of_one_process_that_stands_for_several():
    rows = torch.tensor([0] * 6 + [1] * 4 + [2] * 5 + [3] * 3)
    stands_for_two = {"dp": 2, "micro_batches": 4}
    step = make_record(tokens=tokens() | {"rows": rows}).steps[0]
    for ranks in ((rows > 1).long(), (rows > 2).long(), rows % 2):
        mean, _ = by_hand(ranks[TRAINED])
        near = reproduced(ways(step, stands_for_two), mean, 1e-9)
        assert [way.description for way in near] == ["the mean over each data-parallel rank's tokens, averaged"]
    assert len(list(deals({"rows": rows}, stands_for_two))) == 4
    assert list(deals({"rows": rows}, {"dp": 2, "micro_batches": 2})) == [], "two ranks of two micro-batches each"
    assert list(deals({"rows": torch.arange(30)}, {"dp": 4, "micro_batches": 30})) == [], "too many ways"


def test_a_loss_is_recognised():
    result = ways(make_record().steps[0], CONTEXT)
    assert [way.kind for way in reproduced(result, by_hand(tokens()["shards"][TRAINED])[0], 1e-9)] == ["shards"]
    assert reproduced(result, 123.0, 1e-9) == []


def test_without_values_nothing_is_reproduced():
    assert ways(make_record(tokens={}).steps[0], CONTEXT) == []


@pytest.mark.parametrize(
    ("factor", "said"),
    [
        (2, "cp"),
        (1 / 3, "1 / dp"),
        (7, "tp"),
        (1 / 5, "1 / micro_batches"),
        (6, "cp * dp"),
        (1 / 30, "1 / (cp * dp * micro_batches)"),
        (2 / 3, "1 / (dp / cp)"),
        (1 / 11, "1 / documents"),
        (13 / 11, "all documents / documents"),
        (130, "trained tokens"),
        (170 / 130, "all tokens / trained tokens"),
        (0.8, "temperature"),
        (130 / 11, "trained tokens / documents"),
        (11 / 130, "1 / (trained tokens / documents)"),
        (130 / 132, "1 / ((trained tokens + masked documents) / trained tokens)"),
    ],
)
def test_a_factor_is_named(factor, said):
    assert names_of(factor, sizes(CONTEXT, COUNTS), 1e-9)[0].description == said


def test_sizes_of_one_and_unknown_sizes_explain_nothing():
    assert sizes({"cp": 1}, {}) == {}
    assert names_of(1.5, sizes(CONTEXT, COUNTS), 1e-9)[0].description == "dp / cp"
    assert names_of(0.123456, sizes(CONTEXT, COUNTS), 1e-6) == []


def test_a_more_precise_loss_separates_more_denominators():
    step, context = make_record().steps[0], CONTEXT | {"micro_batches": 1}
    results = {(way.kind, way.description): way.loss for way in ways(step, context, exact=True)}
    usual = {(way.kind, way.description): way.loss for way in ways(step, context)}
    assert usual.items() <= results.items()
    assert len(usual) < len(results) == len(ways(step, context, exact=True)), "no way twice"
    values, labels = tokens()["losses"], tokens()["documents"]
    sums = [float(values[TRAINED & (labels == one)].sum()) for one in range(3)]
    assert results["documents", "the mean over each document's tokens, over all trained tokens"] == pytest.approx(
        (sums[0] / 4 + sums[1] / 4 + sums[2] / 3) / 11
    )
    assert results["documents", "each document's sum over all its tokens, prompts too, averaged"] == pytest.approx(
        sum(sums) / 6 / 3
    )
    assert results["documents", "each document's sum times its tokens, over all trained tokens"] == pytest.approx(
        (4 * sums[0] + 4 * sums[1] + 3 * sums[2]) / 11
    )
    assert results["documents", "the mean over each document's tokens, averaged, empty ones too"] == pytest.approx(
        (sums[0] / 4 + sums[1] / 4 + sums[2] / 3) / (COUNTS["documents"] + COUNTS["masked_documents"])
    )
