"""Scaling contracts of other systems, against a step that is acted out rank by rank."""

import pytest

from tests.oracles.scaling import token_weights
from tests.unit.reduction.test_scaling import rows
from workbench.errors import SpecError
from workbench.launch.ablation import AblationSpec
from workbench.reduction.scaling import StepLayout
from workbench.reduction.weights import step_weights
from workbench.specs.losses import LossSpec, ScalingSpec
from workbench.systems.contracts import contract_table, scaling_contract
from workbench.systems.registry import SYSTEMS, load_system

LENGTHS = [[[3, 1], [2], [4]], [[5], [4, 1], [1, 1]]]
CONTRACTS = {system: load_system(system).scaling for system in SYSTEMS}
MODES = [(system, mode) for system, modes in CONTRACTS.items() for mode in modes]
EXACT = [(system, mode) for system, mode in MODES if not CONTRACTS[system][mode].breaks]


def weights(scaling, denominator, cp):
    flat = [row for rank in LENGTHS for row in rank]
    split = rows(*flat)
    named, _ = step_weights(
        split, LossSpec(scaling=scaling, denominator=denominator), step_layout=StepLayout(dp=2, cp=cp)
    )
    found = {}
    for place, (row, weight) in enumerate(zip(split, named, strict=True)):
        for document in range(len(flat[place])):
            values = weight["policy"].gradient_T[(row.document_ids_T == document) & row.loss_mask_T].tolist()
            found |= {(*divmod(place, 3), document, token): value for token, value in enumerate(values)}
    return found


@pytest.mark.parametrize("denominator", ["token", "document"])
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize(("system", "mode"), MODES)
def test_weights_are_those_of_the_step_acted_out(system, mode, cp, denominator):
    scaling = scaling_contract(system, mode)
    expected = token_weights(LENGTHS, scaling.model_dump(), cp=cp, divide=denominator)
    assert weights(scaling, denominator, cp) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("system", "mode"), EXACT)
def test_an_exact_contract_is_the_houses(system, mode):
    for denominator in ("token", "document"):
        assert weights(scaling_contract(system, mode), denominator, 2) == pytest.approx(
            weights(ScalingSpec(), denominator, 2), rel=1e-12
        )


def test_these_are_not_exact():
    assert set(MODES) - set(EXACT) == {
        ("verl", "local counts"),
        ("trl", "grpo, bnpo, dr_grpo, sapo, luspo"),
        ("liger", "local counts"),
        ("fast_llm", "docs_per_step (#520), labels"),
        ("slime", "per token"),
        ("pipelinerl", "deepspeed"),
        ("nous_torchtitan", "fsdp"),
    }


def test_the_table_says_numbers_and_the_factor():
    table = contract_table(dp=2, cp=3, micro_batches=2, accumulation=2)
    assert len(table) == len(MODES)
    assert table.loc[EXACT, "factor"].tolist() == pytest.approx([1.0] * len(EXACT))
    assert table.loc[("pipelinerl", "deepspeed"), "factor"] == pytest.approx(1 / 24)
    assert table.loc[("pipelinerl", "deepspeed"), "engine"] == "sum, over micro_batches (4) x dp_cp (6)"
    assert table.loc[("fast_llm", "docs_per_step (#520), labels"), "factor"] == pytest.approx(4)
    assert table.loc[("slime", "per sample"), "multiplies"] == "micro_batches (4) x dp_cp (6)"
    assert "micro_batch" in table.loc[("trl", "grpo, bnpo, dr_grpo, sapo, luspo"), "breaks"]


@pytest.mark.parametrize("name", ["dp", "cp", "micro_batches", "accumulation"])
def test_a_table_of_no_ranks_is_refused(name):
    with pytest.raises(SpecError, match=f"{name} = 0"):
        contract_table(**{name: 0})


def test_a_contract_is_an_axis_of_an_ablation():
    contracts = {
        f"{system}.{number}": {"loss": {"scaling": scaling_contract(system, mode).model_dump()}}
        for number, (system, mode) in enumerate(MODES)
    }
    values = {"exact": {"loss": {"scaling": {}}}} | contracts
    ablation = AblationSpec(
        reference="house",
        base={"precision": "float64"},
        configurations={"house": {}},
        axes={"layout.dp": [1, 2], "loss.scaling": values},
    )
    runs = {run.name: run.spec.loss.scaling for run in ablation.expand()}
    assert len(runs) == 2 * (1 + len(MODES))
    assert runs["house-2-exact"] == ScalingSpec()
    assert runs["house-2-pipelinerl.16"] == scaling_contract("pipelinerl")


def test_other_names_are_refused_with_the_known_ones():
    with pytest.raises(SpecError, match=r"one of nemo_rl, verl(?s:.*)did you mean 'nemo_rl'"):
        scaling_contract("NeMo-RL")
    with pytest.raises(SpecError, match="one of 'dtensor', 'megatron'"):
        scaling_contract("nemo_rl", "fsdp")
