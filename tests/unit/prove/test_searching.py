"""The search itself: its counts, its verdicts, and its behaviour when time is short."""

import math
from dataclasses import dataclass, replace

import pytest

import workbench as wb
from workbench.errors import SpecError
from workbench.losses.build import build_loss
from workbench.losses.terms import Term
from workbench.prove import searching
from workbench.prove.invariants import INVARIANTS
from workbench.prove.searching import search
from workbench.prove.subject import WorkbenchSubject
from workbench.specs.run import RunSpec


def subject(name, **settings):
    spec = RunSpec(loss={"name": name}, **settings)
    return WorkbenchSubject(name, spec, build_loss(spec.loss))


def run(who, *invariants, rounds=1, budget_s=60.0, seed=0):
    return search(who, [INVARIANTS[name] for name in invariants], seed=seed, rounds=rounds, budget_s=budget_s)


def test_a_declared_break_is_no_failure():
    proof = run(subject("bnpo"), "micro_batch_split", "micro_batch_order", "cp_degree")
    assert [invariant.verdict for invariant in proof.invariants] == ["declared", "holds", "holds"]
    assert proof.ok
    assert proof["micro_batch_split"].counterexample.changed.startswith("one rank, 4 micro-batches")
    assert 0 < proof["cp_degree"].worst < 1e-12


def test_a_declared_invariant_that_holds_is_reported():
    spec = RunSpec(
        loss={"name": "grpo", "compat": {"scaling": {"counts": "pass"}}}
    )  # each pass of all dp ranks has its count
    proof = run(WorkbenchSubject("grpo", spec, build_loss(spec.loss)), "dp_split", "packing_order")
    assert [invariant.verdict for invariant in proof.invariants] == ["declared, but holds", "declared"]
    assert proof["dp_split"].why == "the spec declares 'dp'"
    assert proof.kept == ("dp_split",)


def test_a_known_bug_is_detected_and_shrunk_with_its_factor():
    proof = run(subject("grpo", faults=["missing_cp_factor"]), "cp_degree", "cp_order", "together", rounds=2)
    assert proof.broken == ("cp_degree",)
    invariant = proof["cp_degree"]
    assert (invariant.differing[0], invariant.factor_name, invariant.cases) == ("gradient", "1 / cp", 1)
    assert invariant.factor == pytest.approx(0.5, rel=1e-9)
    assert len(invariant.counterexample.documents) == 1
    assert invariant.counterexample.batch.num_documents == 1
    assert proof["cp_order"].verdict == "holds", "both orders lack the same factor"
    assert proof["together"].verdict == "skipped"


def test_a_bug_that_turns_the_gradient_has_no_factor(unshrunk):
    proof = run(subject("gspo", faults=["document_sum_without_adjoint"]), "cp_degree", "tp")
    assert proof.broken == ("cp_degree",)
    assert proof["cp_degree"].factor is None
    assert "the gradient is another one" in proof["cp_degree"].counterexample.description
    assert "loss" not in proof["cp_degree"].differing, "the value is right, only its gradient is not"


def test_without_time_nothing_is_cached():
    proof = run(subject("grpo"), "dp_split", "tp", budget_s=0.0)
    assert proof.untried == ("dp_split", "tp")
    assert not proof.ok
    assert math.isnan(proof["tp"].worst)


def test_the_same_seed_tries_the_same_cases():
    one, again, other = (run(subject("grpo"), "padding", seed=seed) for seed in (1, 1, 2))
    assert one["padding"] == again["padding"]
    assert one["padding"].worst != other["padding"].worst


@dataclass(frozen=True)
class Spoiled:
    """A step whose loss is NaN on every rank, or whose ranks raise under an invariant."""

    run_spec: RunSpec
    right: WorkbenchSubject
    everywhere: bool
    title: str = "spoiled"
    declared: tuple[str, ...] = ()

    def step(self, policy, rows, totals):
        if policy.mesh["dp"].size > 1:
            raise KeyError("rank")
        result = self.right.step(policy, rows, totals)
        return (
            replace(result, gradients={name: g * math.nan for name, g in result.gradients.items()})
            if self.everywhere
            else result
        )


@dataclass(frozen=True)
class NeedsWork:
    """A step that raises on a rank whose micro-batch has nothing to train."""

    run_spec: RunSpec
    right: WorkbenchSubject
    title: str = "needs work"
    declared: tuple[str, ...] = ()

    def step(self, policy, rows, totals):
        assert all(bool(local.row.loss_mask_T.any()) for local in rows)
        return self.right.step(policy, rows, totals)


@dataclass(frozen=True)
class Declares(NeedsWork):
    """The same, on ranks where a part of the layout has several."""

    where: str = "cp"
    declared: tuple[str, ...] = ("dp", "micro_batch", "packing", "cp")

    def step(self, policy, rows, totals):
        return (super() if policy.mesh[self.where].size > 1 else self.right).step(policy, rows, totals)


def test_no_declaration_excuses_an_error(unshrunk):
    proof = run(Declares(RunSpec(), subject("bnpo")), "empty_ranks", rounds=3)
    assert proof.broken == ("empty_ranks",), proof
    assert proof["empty_ranks"].differing == ("error",)


def padding_of_the_shard(inputs):
    """Wrong wherever a shard has more padding, or less."""
    share = 1 + 1 / (1 + (~inputs.counts_T).sum())
    return {"policy": Term(-inputs.log_ratio().exp() * inputs.counted_advantages_T * share)}


def test_a_micro_batch_declaration_excuses_no_empty_rank(monkeypatch):
    monkeypatch.setattr(searching, "TRIES", 2)  # the other kinds of empty ranks, which are declared
    spec = RunSpec(loss={"name": "bnpo"})
    assert "cp" not in spec.loss.breaks
    who = WorkbenchSubject("shard", spec, padding_of_the_shard, from_spec=False)
    proof = run(who, "empty_ranks", rounds=3)
    assert proof.broken == ("empty_ranks",), proof
    assert "cp=2" in proof["empty_ranks"].counterexample.changed
    declared = run(subject("bnpo"), "empty_ranks", rounds=3)
    assert declared["empty_ranks"].verdict == "declared"


def test_an_idle_rank_is_covered_by_one_invariant_only(unshrunk):
    proof = run(
        NeedsWork(RunSpec(), subject("grpo")),
        "dp_split",
        "micro_batch_split",
        "packing_order",
        "cp_degree",
        "cp_order",
        "masked_rows",
        "empty_ranks",
        rounds=2,
    )
    assert proof.broken == ("empty_ranks",), proof
    assert not proof.untried
    cut_idle = run(NeedsWork(RunSpec(), subject("grpo")), "cp_degree", seed=10)  # of its first draw a shard is idle
    assert (cut_idle.broken, cut_idle["cp_degree"].cases) == ((), 1), "and others were drawn instead"


def test_a_loss_without_finite_numbers_on_one_rank_is_refused():
    with pytest.raises(SpecError, match="one rank has finite numbers"):
        run(Spoiled(RunSpec(), subject("grpo"), everywhere=True), "padding")


def test_a_division_by_the_length_of_a_document_without_trained_tokens_is_named(unshrunk):
    """0 / 0 of such a document: one rank has it as well, and the loss is proved on the others."""
    invariants = ["padding", "masked_rows", "dp_split", "cp_degree", "empty_ranks"]
    proof = wb.prove(per_document_mean, invariants=invariants, rounds=3, budget_s=60)
    assert {"padding", "masked_rows"} <= set(proof.broken), proof
    assert proof["masked_rows"].differing == ("not a number",)
    assert proof["dp_split"].cases == 3, "and what does not need them is tried on the others"


def per_document_mean(inputs):
    """Each token over the trained tokens of its document, without a floor: a document of none is 0 / 0 everywhere."""
    counts = inputs.document_sums.document(inputs.loss_mask_T.to(inputs.policy_logprobs_T.dtype))
    shares = 1 / counts
    anywhere = (shares * counts).sum() * 0.0
    return {"policy": Term(-inputs.advantages_T * inputs.policy_logprobs_T + anywhere)}


def test_a_loss_that_remembers_is_refused():
    calls = []

    def remembers(inputs):
        calls.append(0)
        return {"policy": Term(-len(calls) * inputs.log_ratio().exp())}

    with pytest.raises(SpecError, match="the same numbers each time"):
        run(WorkbenchSubject("remembers", RunSpec(), remembers, from_spec=False), "padding")


def test_an_error_absent_on_one_rank_breaks_an_invariant(unshrunk):
    proof = run(Spoiled(RunSpec(), subject("grpo"), everywhere=False), "dp_split", "padding")
    assert proof.broken == ("dp_split",)
    assert (proof["dp_split"].differing, proof["dp_split"].counterexample.description) == (
        ("error",),
        "KeyError: 'rank'",
    )


def test_a_loss_without_any_gradient_is_not_proved():
    def silent(inputs):
        return {"policy": Term(0.0 * inputs.counted_logprobs_T)}

    proof = run(WorkbenchSubject("silent", RunSpec(), silent, from_spec=False), "padding")
    assert proof.untried == ("padding",)
    assert "had a gradient" in proof["padding"].why


def test_an_error_on_one_rank_is_raised_to_the_user():
    def wrong(inputs):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        run(WorkbenchSubject("wrong", RunSpec(), wrong, from_spec=False), "padding")
