"""`prove`: its inputs, and user losses."""

import time

import pytest
import torch

import workbench as wb
from tests.helpers.trainer_losses import RIGHT, cp_left_out, token_mean_undoing_the_average
from workbench.errors import SpecError, VerdictError
from workbench.losses.terms import Term
from workbench.prove import CONSTANT, as_subject, assert_proved, prove
from workbench.prove.subject import WorkbenchSubject
from workbench.specs.losses import PRESETS, LossSpec
from workbench.specs.run import RunSpec
from workbench.user_file import load

SAMPLE = ("gspo", "dpo")


def sapo_by_hand(inputs):
    """Right: per token, and of whole documents only through their sums."""
    ratio_T = inputs.document_mean(inputs.log_ratio()).exp()
    return {
        "policy": Term(-torch.sigmoid(ratio_T - 1) * inputs.counted_advantages_T),
        "kl": Term(inputs.log_ratio("ref").square(), coefficient=0.1),
    }


def centred_here(inputs):
    """Wrong: the mean advantage of this rank's own tokens."""
    advantages_T = inputs.counted_advantages_T
    centred_T = advantages_T - advantages_T.sum() / inputs.counts_T.sum().clamp_min(1)
    return {"policy": Term(-inputs.log_ratio().exp() * centred_T)}


def test_it_is_public():
    assert wb.prove is prove


@pytest.mark.parametrize("name", SAMPLE)
def test_a_preset_keeps_every_invariant(name):
    proof = prove(name, rounds=1, budget_s=120)
    assert proof.ok, proof
    assert not proof.declared
    assert len(proof.kept) == 15


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_keeps_every_invariant_or_breaks_declared_ones(name, seed):
    proof = prove(name, seed=seed, rounds=6, budget_s=600)
    assert proof.ok, proof
    assert "declared, but holds" not in {invariant.verdict for invariant in proof.invariants}, proof
    assert bool(proof.declared) == bool(LossSpec(name=name).breaks)


def test_a_loss_that_was_just_written_is_proved():
    proof = prove(
        sapo_by_hand,
        spec=LossSpec(denominator="document"),
        invariants=["cp_degree", "cp_order", "masked_rows"],
        rounds=1,
        budget_s=60,
    )
    assert proof.ok, proof
    assert proof.subject == "sapo_by_hand"


def test_one_that_looks_at_its_own_tokens_is_refuted():
    proof = prove(centred_here, invariants=["dp_split", "tp", "padding"], rounds=1, budget_s=60)
    assert proof.broken == ("dp_split",), proof
    assert len(proof["dp_split"].counterexample.documents) == 2


def test_every_form_of_a_loss_is_taken():
    assert as_subject("dapo").run_spec.loss == LossSpec(name="dapo")
    assert as_subject(LossSpec(name="dapo", denominator="document")).run_spec.loss.denominator == "document"
    assert as_subject({"name": "gspo"}).title == "gspo"
    spec = RunSpec(loss={"name": "ppo"}, faults=["missing_cp_factor"])
    assert as_subject(spec).run_spec is spec
    assert as_subject({"loss": {"name": "ppo"}, "data": {"keep_groups": True}}).run_spec.data.keep_groups
    right = RIGHT["token mean, sum"]
    assert as_subject(right.loss, engine=right.engine).title == "token_mean (engine sum)"
    assert as_subject(sapo_by_hand, spec={"name": "bnpo"}).declared == ("micro_batch", "packing", "dp")


def test_a_loss_that_divides_by_a_constant_gets_one():
    assert as_subject("dr_grpo").run_spec.loss.denominator_constant == CONSTANT
    assert as_subject({"name": "dr_grpo", "denominator_constant": 3.0}).run_spec.loss.denominator_constant == 3.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((3,), "a preset's name, a LossSpec"),
        (("gropo",), "did you mean 'grpo'"),
        (({"surogate": {}},), "did you mean 'surrogate'"),
    ],
)
def test_an_invalid_loss_is_refused(arguments, words):
    with pytest.raises(SpecError, match=words):
        prove(*arguments)


def test_conflicting_arguments_are_refused():
    with pytest.raises(SpecError, match="an engine is about a trainer's function"):
        prove("grpo", engine="sum")
    with pytest.raises(SpecError, match="a spec goes with a function"):
        prove("grpo", spec=LossSpec())
    with pytest.raises(SpecError, match="did you mean 'cp_degree'"):
        prove("grpo", invariants=["cp_degre"])


def test_a_function_of_other_arguments_is_refused_with_the_form_that_it_has():
    trainers = RIGHT["token mean, sum"].loss
    with pytest.raises(SpecError, match=r"token_mean\(batch, outputs, totals\)(?s:.*)engine = 'sum' or 'mean'"):
        prove(trainers)
    with pytest.raises(SpecError, match=r"sapo_by_hand\(inputs\)(?s:.*)leave engine out"):
        prove(sapo_by_hand, engine="sum")


def test_no_invariants_are_no_proof():
    with pytest.raises(SpecError, match="at least one invariant"):
        prove("grpo", invariants=[])


def test_a_function_that_gives_no_terms_is_refused():
    def one_number(inputs):
        return inputs.policy_logprobs_T.sum()

    with pytest.raises(SpecError, match=r"one_number\(inputs\)\n  found: a Tensor"):
        prove(one_number, invariants=["padding"], rounds=1)


CHEAP = {"engine": "mean", "rounds": 1, "budget_s": 60}


def test_a_loss_that_keeps_its_invariants_passes_with_its_proof():
    proof = assert_proved(token_mean_undoing_the_average, invariants=["cp_degree", "tp"], **CHEAP)
    assert proof.kept == ("cp_degree", "tp")


def test_one_that_does_not_fails_with_the_table_and_the_counterexample(unshrunk):
    with pytest.raises(AssertionError) as failure:
        assert_proved(cp_left_out, invariants=["cp_degree"], **CHEAP)
    words = str(failure.value)
    assert isinstance(failure.value, VerdictError)
    assert words.startswith("prove cp_left_out (engine mean)\n  found: cp_left_out (engine mean): breaks cp_degree")
    assert "cp_degree  broken" in words
    assert "(1 / cp)" in words
    assert "document 0: " in words


def test_an_untested_invariant_is_no_pass():
    with pytest.raises(VerdictError, match="1 not tried"):
        assert_proved(token_mean_undoing_the_average, invariants=["cp_degree"], engine="mean", budget_s=0)


def test_a_mistake_in_a_function_is_told_before_a_model_is_built(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def misnamed(inputs):\n    return {'policy': -inputs.advantages * inputs.policy_logprobs_T}\n"
        "def number(inputs):\n    return -inputs.policy_logprobs_T.mean()\n"
    )
    began = time.process_time()
    with pytest.raises(SpecError, match=r"did you mean 'advantages_T'\?\), in line 2 of mine.py"):
        prove(load(file, "misnamed", setting="x"))
    with pytest.raises(SpecError, match="its terms by name, a dict"):
        prove(load(file, "number", setting="x"))
    assert time.process_time() - began < 2, "0.01 s; with a model 4 s"


def test_what_four_tokens_lack_is_no_mistake():
    def needs_more(inputs):
        if len(inputs.policy_logprobs_T) == 4 and inputs.lengths_T.tolist() == [2.0] * 4:
            raise ValueError("these are not my tokens")
        return {"policy": Term(-inputs.advantages_T * inputs.policy_logprobs_T)}

    assert isinstance(as_subject(needs_more), WorkbenchSubject)
