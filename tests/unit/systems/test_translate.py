"""From options to a spec, and back where there is a way; scaling contracts, against a step acted out rank by rank."""

import dataclasses

import pytest
from pydantic import Field

from tests.oracles.scaling import token_weights
from tests.unit.reduction.test_weights import trained_rows as rows
from tests.unit.systems.test_explanations import LOSSES, spec_of
from workbench.errors import SpecError
from workbench.launch.ablation import AblationSpec
from workbench.losses.canonical import canonical
from workbench.reduction.weights import StepLayout, step_weights
from workbench.specs.losses import LossSpec, ScalingSpec
from workbench.systems import loss_spec, settings_for
from workbench.systems import registry as systems
from workbench.systems.registry import SYSTEMS, Settings, Translation, load_system
from workbench.systems.translate import (
    checked_back,
    contract_table,
    differences,
    scaling_contract,
    translation,
    unsupported,
)


def test_defaults_are_the_systems():
    assert loss_spec("verl", {}).surrogate.dual_clip == 3.0
    assert loss_spec("trl", {}) == translation("trl", {}).spec


def led_back(system, spec):
    """The spec of the options for a spec; None if the system has none."""
    try:
        options = settings_for(system, spec)
    except SpecError:
        return None
    return loss_spec(system, options)


@pytest.mark.parametrize("system", systems.SYSTEMS)
def test_options_for_a_systems_own_loss_lead_back_to_it(system):
    own = [loss_spec(system, {}), *(spec_of(*case) for case in LOSSES if case[0] == system)]
    pairs = [(back, spec) for spec in own if (back := led_back(system, spec)) is not None]
    assert len(pairs) > 0.5 * len(own)
    for back, spec in pairs:
        assert canonical(back) == canonical(spec)


@pytest.mark.parametrize("system", systems.SYSTEMS)
def test_an_unsupported_loss_is_refused(system):
    spec = LossSpec(name="clip_cov") if system != "verl" else LossSpec(name="vespo")
    with pytest.raises(SpecError) as caught:
        settings_for(system, spec)
    assert caught.value.parts["rule"]


def test_a_system_without_back_translation_is_reported(monkeypatch):
    one_way = dataclasses.replace(load_system("verl"), back=None)
    monkeypatch.setattr("workbench.systems.translate.load_system", lambda _: one_way)
    with pytest.raises(SpecError, match="options of verl for a spec"):
        settings_for("verl", LossSpec())


class Clip(Settings):
    clip: float = Field(0.2, ge=0)


def translate(settings):
    return Translation(LossSpec(surrogate={"clip_low": settings.clip, "clip_high": settings.clip}))


def back(spec, **settings):
    return checked_back("Nobody", spec, Clip, translate, settings)


def test_settings_of_an_equal_loss_are_returned_under_any_name():
    assert back(LossSpec(name="ppo", surrogate={"clip_low": 0.1, "clip_high": 0.1}), clip=0.1) == {"clip": 0.1}


def test_a_differing_value_is_reported_with_both_values():
    with pytest.raises(SpecError, match=r"surrogate\.clip_high = 0\.28 \(Nobody: 0\.2\)") as caught:
        back(LossSpec(name="dapo"), clip=0.2)
    assert "Nobody has no option for this" in str(caught.value)


@pytest.mark.parametrize("scaling", [{"counts": "micro_batch"}, {"engine_divides": ["dp"]}])
def test_another_way_to_cut_a_step_is_another_loss(scaling):
    with pytest.raises(SpecError, match=r"scaling\."):
        back(LossSpec(compat={"scaling": scaling}), clip=0.2)


def test_factors_that_cancel_are_none():
    spec = LossSpec(compat={"scaling": {"multiplied_by": ["dp"], "engine_divides": ["dp"]}})
    assert back(spec, clip=0.2) == {"clip": 0.2}


def test_a_penalty_in_the_reward_is_not_dropped():
    spec = LossSpec(surrogate={"clip_low": 0.2, "clip_high": 0.2}, kl={"coefficient": 0.1, "placement": "reward"})
    with pytest.raises(SpecError, match=r"kl\.coefficient = 0\.1 \(Nobody: 0\.0\)"):
        back(spec, clip=0.2)


def test_differences_are_listed_by_path_and_names_of_presets_are_none():
    spec = LossSpec(name="vapo", kl={"coefficient": 0.1})
    results = {path for path, _, _ in differences(spec, LossSpec(name="dapo"))}
    assert results == {"kl.coefficient", "positive_nll_coefficient"}
    assert (
        differences(LossSpec(correction={"kind": "tis"}), LossSpec(correction={"ratio": "token", "ratio_high": 2.0}))
        == []
    )


def test_a_loss_that_a_system_has_not_is_refused_with_the_rule():
    error = unsupported("Nobody", "the surrogate 'sapo'", "it clips")
    assert isinstance(error, SpecError)
    assert "options of Nobody for the surrogate 'sapo'" in str(error)
    assert "it clips" in str(error)


LENGTHS = [[[3, 1], [2], [4]], [[5], [4, 1], [1, 1]]]
CONTRACTS = {system: load_system(system).scaling for system in SYSTEMS}
MODES = [(system, mode) for system, modes in CONTRACTS.items() for mode in modes]
EXACT = [(system, mode) for system, mode in MODES if not CONTRACTS[system][mode].breaks]


def weights(scaling, denominator, cp):
    flat = [row for rank in LENGTHS for row in rank]
    split = rows(*flat)
    named, _ = step_weights(
        split, LossSpec(compat={"scaling": scaling}, denominator=denominator), step_layout=StepLayout(dp=2, cp=cp)
    )
    results = {}
    for place, (row, weight) in enumerate(zip(split, named, strict=True)):
        for document in range(len(flat[place])):
            values = weight["policy"].gradient_T[(row.document_ids_T == document) & row.loss_mask_T].tolist()
            results |= {(*divmod(place, 3), document, token): value for token, value in enumerate(values)}
    return results


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
        ("miles", "per token"),
        ("pipelinerl", "deepspeed"),
        ("nous_torchtitan", "fsdp"),
        ("skyrl", "token_mean_legacy"),
    }


def test_the_table_has_numbers_and_the_factor():
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
        f"{system}.{number}": {"loss": {"compat": {"scaling": scaling_contract(system, mode).model_dump()}}}
        for number, (system, mode) in enumerate(MODES)
    }
    values = {"exact": {"loss": {"compat": {"scaling": {}}}}} | contracts
    ablation = AblationSpec(
        reference="house",
        base={"precision": "float64"},
        configurations={"house": {}},
        axes={"layout.dp": [1, 2], "loss.compat.scaling": values},
    )
    runs = {run.name: run.spec.loss.compat.scaling for run in ablation.expand()}
    assert len(runs) == 2 * (1 + len(MODES))
    assert runs["house-2-exact"] == ScalingSpec()
    assert runs["house-2-pipelinerl.18"] == scaling_contract("pipelinerl")


def test_unknown_names_are_refused_with_the_valid_names():
    with pytest.raises(SpecError, match=r"one of nemo_rl, verl(?s:.*)did you mean 'nemo_rl'"):
        scaling_contract("NeMo-RL")
    with pytest.raises(SpecError, match="one of 'dtensor', 'megatron'"):
        scaling_contract("nemo_rl", "fsdp")
