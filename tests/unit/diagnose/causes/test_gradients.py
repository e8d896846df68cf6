"""Causes in gradients of parts of the model: other parts that are right tell where the mistake is."""

from dataclasses import replace

import pytest
import torch

from tests.helpers.hand_records import (
    METRICS,
    gradients,
    make_record,
    mixed,
    tokens,
    values,
)
from workbench.diagnose import Record, diagnose
from workbench.diagnose.diagnosis import diagnose_records
from workbench.diagnose.evidence import compare_records
from workbench.diagnose.facts import Facts
from workbench.diagnose.record import RecordedStep


@pytest.fixture(scope="module")
def trusted():
    return make_record(metrics=METRICS | {"advantage/all/std": 1.0})


def named(trusted, suspect):
    return [cause.name for cause in diagnose_records(trusted, suspect).causes]


def first_of(trusted, suspect):
    return diagnose_records(trusted, suspect).causes[0].name


def test_an_update_that_differs():
    def two(later):
        first = make_record().steps[0]
        second = RecordedStep(1, loss=0.3, tokens=tokens() | {"policy_logprobs": tokens()["policy_logprobs"] + later})
        return replace(make_record(), steps=(first, second))

    diagnosis = diagnose_records(two(0.0), two(torch.linspace(-1, 1, 18)))
    assert diagnosis.causes[0].name == "update"
    assert diagnosis.headline.startswith("from step 1 on")


def test_reported_settings_are_compared(trusted):
    diagnosis = diagnose_records(trusted, make_record({"learning_rate": 2.0}, loss=0.26))
    assert "other_settings" not in [cause.name for cause in diagnosis.causes], "only one of them says it"
    both = diagnose_records(
        replace(trusted, context=trusted.context | {"learning_rate": 1.0}),
        make_record({"learning_rate": 2.0}, loss=0.26),
    )
    assert both["other_settings"].evidence == ("learning_rate is 2.0, not 1.0",)


def test_a_gradient_that_was_not_cleared():
    def two(kept):
        later = {name: each + kept * gradients()[name] for name, each in gradients(4).items()}
        return replace(
            make_record(), steps=(make_record().steps[0], replace(make_record(changes=later).steps[0], number=1))
        )

    diagnosis = diagnose_records(two(0.0), two(1.0))
    assert diagnosis.causes[0].name == "gradients_not_cleared"
    assert "1 times the gradient of the step before" in diagnosis.causes[0].evidence[0]


def test_all_tokens_of_a_rank_that_do_not_train_are_a_lost_rank():
    lost = values(trained=lambda trained: trained & (tokens()["shards"] == 0))
    assert first_of(make_record(), make_record(tokens=lost, loss=0.2, changes=mixed([""]))) == "ranks_lost"


def test_a_gradient_shorter_than_any_part_is_no_part():
    part, less = ({name: size * each for name, each in mixed([""]).items()} for size in (0.2, 0.005))
    assert first_of(make_record(), make_record(changes=part)) == "ranks_lost"
    assert first_of(make_record(), make_record(changes=less)) == "term_without_gradient"


def test_a_gradient_with_an_opposed_rest_is_no_part():
    other = gradients(9)
    against = {name: 0.8 * each - 0.1 * other[name] for name, each in gradients().items()}
    assert first_of(make_record(), make_record(changes=against)) == "term_without_gradient"


def test_below_a_tied_head_everything_is_scaled_but_the_embedding():
    own = gradients(9)["model.embed_tokens.weight"]
    step = make_record().steps[0]
    right = {name: each for name, each in step.gradients.items() if name != "lm_head.weight"}
    wrong = {name: 7 * each for name, each in right.items()} | {
        "model.embed_tokens.weight": 7 * right["model.embed_tokens.weight"] + own
    }
    norms = [{name: float(each.norm()) for name, each in held.items()} for held in (right, wrong)]
    assert (
        first_of(
            *(
                replace(make_record(), steps=(replace(step, gradients=held, gradient_norms=text),))
                for held, text in zip((right, wrong), norms, strict=True)
            )
        )
        == "gradient_below_head"
    )


@pytest.mark.parametrize(("size", "told"), [(0.004, True), (0.006, False)])
def test_a_correct_gradient_below_the_head_is_ignored_up_to_a_thousandth(size, told):
    small = {"model.norm.weight": size * gradients()["model.norm.weight"]}
    wrong = {name: each for name, each in mixed(["model."]).items() if name not in small}
    right, suspect = make_record(changes=small), make_record(changes=wrong | small)
    share = Facts(compare_records(right, suspect)).right["model.norm.weight"].share
    assert (share < 1e-3) == told
    assert share < 2e-3
    assert ("gradient_below_head" in named(right, suspect)) == told


@pytest.mark.parametrize(("wrong_too", "told"), [([], True), (["1.mlp"], False)])
def test_an_mlp_with_a_correct_input_gradient_is_distinguished_from_a_wrong_one(wrong_too, told):
    name = "model.layers.1.post_attention_layernorm.weight"
    one, other = torch.randn(2, 40, generator=torch.Generator().manual_seed(40), dtype=torch.float64)
    wrong = mixed(["embed", ".0.", "1.self_attn", "1.input_layernorm", *wrong_too]) | {name: other}
    diagnosis = diagnose_records(make_record(changes={name: one}), make_record(changes=wrong))
    assert (diagnosis.causes[0].name == "layer_input_gradient") == told
    assert ("the MLP is right" in diagnosis.causes[0].evidence[0]) == told


@pytest.mark.parametrize("balanced", [True, False])
def test_a_router_is_one_where_its_losses_are_reported(balanced):
    """A dense feed-forward layer may call one of its projections a gate."""
    one, other, experts = torch.randn(3, 40, generator=torch.Generator().manual_seed(40), dtype=torch.float64)
    name, more = "model.layers.1.mlp.gate.weight", {"model.layers.1.mlp.experts.gate_up_proj": experts}
    told = {"metrics": METRICS | ({"loss/router_balance": 0.1} if balanced else {})}
    wrong = mixed(["embed", ".0.", "1.self_attn", "1.input_layernorm"]) | {name: other}
    right = make_record(changes=more | {name: one}, **told)
    diagnosis = diagnose_records(right, make_record(changes=more | wrong, **told))
    assert (diagnosis.causes[0].name == "router_gradient") == balanced, str(diagnosis)
    alone = diagnose_records(right, make_record(changes=more | {name: other}, **told))
    assert alone.causes[0].name != "router_gradient", "routers alone miss a sum over ranks"


# ---- one module of several


NAMES = [
    f"{module}.layers.{layer}.{part}.weight"
    for module in ("encoder", "model")
    for layer in range(2)
    for part in ("self_attn.q_proj", "mlp.fc1")
]
OWN = {"modules": {"encoder": {"dp": 3, "cp": 1, "tp": 1}}, "dp": 1, "cp": 2, "tp": 1, "precision": "float64"}


def of_modules(change=lambda name, gradient: gradient):
    draw = torch.Generator().manual_seed(0)
    results = {name: torch.randn(8, 4, generator=draw, dtype=torch.float64) for name in [*NAMES, "encoder.last.bias"]}
    return {name: change(name, gradient) for name, gradient in results.items()}


def told(change, context=OWN, loss=0.5):
    def record(given, loss):
        norms = {name: float(gradient.norm()) for name, gradient in given.items()}
        return Record(context, (RecordedStep(0, loss, {}, norms, {}, given, {}),), "")

    return diagnose(record(of_modules(), 0.5), record(of_modules(change), loss))


def inside(factor):
    return lambda name, gradient: gradient * factor if name.startswith("encoder.") else gradient


@pytest.mark.parametrize(("factor", "words"), [(1 / 3, "1 / dp of encoder"), (2.0, "cp"), (5.5, "no size on record")])
def test_a_factor_on_one_module_is_named(factor, words):
    first = told(inside(factor)).causes[0]
    assert first.name == "module_scaled"
    assert words in first.evidence[0]


def test_a_wrong_gradient_in_one_module_comes_from_its_output():
    def turned(name, gradient):
        return gradient.flip(0) if name.startswith("encoder.layers") else gradient

    first = told(turned).causes[0]
    assert (first.name, "all of encoder" in first.evidence[0]) == ("module_reached_wrongly", True)


def test_a_layer_is_not_a_module_and_neither_is_a_whole_model():
    def one_layer(name, gradient):
        return gradient * 2 if name.startswith("encoder.layers.0") else gradient

    def all_but_one_layer(name, gradient):
        return gradient * 2 if name.startswith("encoder.") and ".1." not in name else gradient

    for change in (one_layer, all_but_one_layer):
        assert not {"module_scaled", "module_reached_wrongly"} & {cause.name for cause in told(change).causes}
    assert told(lambda name, gradient: gradient * 2).causes[0].name == "times_cp"


def test_another_loss_is_no_matter_of_one_module():
    assert "module_scaled" not in {cause.name for cause in told(inside(2.0), loss=0.7).causes}


BEHIND = [3, 4, 5, 6, 7, 10, 11, 12, 13, 14, 15]


@pytest.mark.parametrize(("moved", "score"), [(BEHIND, 0.95), ([12], 0.4), ([1, 12], None), ([], None)])
def test_tokens_that_differ_behind_features_read_other_ones(moved, score):
    features_S = torch.full((16,), -1)
    features_S[[2, 9]] = torch.tensor([4, 5])
    laid = {"trained": torch.arange(16) % 8 > 0, "documents": torch.arange(16) // 8, "features": features_S}
    said_S = torch.linspace(-3, -1, 16, dtype=torch.float64)

    def record(values_S):
        return Record(
            {"precision": "float64"}, (RecordedStep(0, 0.5, {}, {}, {}, {}, laid | {"policy_logprobs": values_S}),), ""
        )

    other_S = said_S.clone()
    other_S[moved] += 0.1 * torch.tensor([(-1.0) ** at for at in range(len(moved))], dtype=torch.float64)
    results = {cause.name: cause.score for cause in diagnose(record(said_S), record(other_S)).causes}
    assert results.get("other_features") == (None if score is None else pytest.approx(score))


def test_a_gradient_that_the_recorder_saw_cleared_was_cleared():
    def two(kept):
        later = {name: each + kept * gradients()[name] for name, each in gradients(4).items()}
        second = make_record(changes=later, observed={"cleared": True}).steps[0]
        return replace(make_record(), steps=(make_record().steps[0], replace(second, number=1)))

    names = [cause.name for cause in diagnose_records(two(0.0), two(1.0)).causes]
    assert "gradients_not_cleared" not in names
