"""Facts about losses: of the first step that differs, and of later ones, where ratios have left 1."""

from dataclasses import replace

import torch

from tests.unit.diagnose.test_surrogates import mean, record, token_losses, values
from workbench.diagnose.diagnosis import diagnose_records
from workbench.diagnose.evidence import compare_records
from workbench.diagnose.loss_facts import LossFacts
from workbench.diagnose.record import Record


def run(kind, seed, *, ratios=False):
    """Two steps: in the first every ratio is 1, so that all kinds of ratio have one loss."""
    steps = []
    for number in range(2):
        tokens = values(on_policy=not number, seed=number)
        noted = token_losses(tokens | {"advantages": torch.ones(39)}, 9, 9e9, kind)
        more = {"ratios": -torch.tensor(noted)} if ratios else {}
        [step] = record(None if ratios else mean(tokens, token_losses(tokens, kind=kind)), tokens | more, seed).steps
        steps.append(replace(step, number=number))
    return Record({"precision": "float32", "micro_batches": 3}, steps)


def facts(*pair):
    return LossFacts(compare_records(*pair))


def test_a_surrogate_is_told_by_a_later_step_where_the_first_that_differs_has_ratios_of_1():
    result = facts(run("document", 0), run("sum", 1))
    assert result.step.number == 0
    assert [form.ratios for form in result.other_surrogate] == [
        "ratios of documents",
        "ratios multiplied over documents",
    ]
    assert diagnose_records(run("document", 0), run("sum", 1)).causes[0].name == "ratio"
    assert facts(run("sum", 0), run("sum", 1)).other_surrogate is None
    assert facts(run("sum", 0), run("sum", 0)).other_surrogate is None, "nothing differs"


def test_noted_ratios_are_compared_by_their_kinds():
    result = facts(run("token", 0, ratios=True), run("document", 1, ratios=True))
    assert result.other_ratios == "noted ratios are ratios of documents, and in the trusted run ratios"
    assert facts(run("token", 0, ratios=True), run("token", 1, ratios=True)).other_ratios == ""
    assert facts(run("token", 0, ratios=True), run("token", 1)).other_ratios == ""


def test_values_of_the_loss_that_agree_token_by_token():
    tokens = values()
    losses = {"losses": torch.tensor(token_losses(tokens))}
    moved = {"losses": losses["losses"].clone()}
    moved["losses"][6] += 0.1
    right, wrong = record(0.1, tokens | losses), record(0.2, tokens | moved)
    assert facts(right, record(0.2, tokens | losses)).token_losses_same
    assert facts(right, wrong).token_losses_same is False
    assert facts(record(0.1, tokens), wrong).token_losses_same is None


def test_a_denominator_is_named_although_the_trusted_one_is_a_number_of_its_own():
    """Dr. GRPO divides by a constant, arXiv 2503.20783."""
    tokens = values()
    tokens["losses"] = torch.tensor(token_losses(tokens))
    of_constant = float(tokens["losses"][tokens["trained"]].double().sum()) / 777.0
    of_documents = mean(tokens, tokens["losses"].double().tolist(), "documents")
    result = facts(record(of_constant, tokens), record(of_documents, tokens, 1))
    assert result.ways[0].kind == "documents"
    assert not facts(record(of_documents, tokens), record(of_constant, tokens, 1)).ways
    assert not facts(record(of_constant, tokens), record(1.1 * of_constant, tokens, 1)).ways
