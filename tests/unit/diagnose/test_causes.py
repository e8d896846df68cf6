"""Each cause is first where mathematics says so, and silent where nothing speaks for it."""

from dataclasses import replace

import pytest
import torch

from tests.helpers.hand_records import gradients, make_record, norms_alone, tokens
from workbench.diagnose.causes import CAUSES
from workbench.diagnose.diagnosis import diagnose_records
from workbench.diagnose.evidence import compare_records
from workbench.diagnose.facts import Facts
from workbench.diagnose.record import RecordedStep


def changed(names, factor):
    return {name: values * factor for name, values in gradients().items() if any(part in name for part in names)}


def mixed(names):
    other = gradients(9)
    return {name: 0.3 * values + other[name] for name, values in gradients().items() if any(p in name for p in names)}


def values(**by_name):
    return tokens() | {name: function(tokens()[name]) for name, function in by_name.items()}


def put(where, number):
    def function(values_S):
        out = values_S.clone()
        out[where] = number
        return out

    return function


ENTROPY = tokens()["policy_logprobs"] + tokens()["entropy_nats"]
METRICS = {"loss/policy": 0.2, "loss/kl": 0.05, "ratio/policy_old/mean": 1.0}
WRONG = {
    "no_difference": {},
    "times_cp": {"scale": 2.0},
    "over_cp": {"scale": 0.5, "loss": 0.125},
    "times_dp": {"scale": 3.0},
    "over_dp": {"scale": 1 / 3},
    "times_tp": {"scale": 7.0},
    "times_micro_batches": {"scale": 5.0},
    "over_micro_batches": {"scale": 0.2},
    "over_cp_dp": {"scale": 1 / 6},
    "times_dp_over_cp": {"scale": 3 / 2},
    "times_cp_over_dp": {"scale": 2 / 3},
    "over_cp_dp_micro_batches": {"scale": 1 / 30},
    "over_documents": {"scale": 1 / 11},
    "over_all_tokens_per_trained_tokens": {"scale": 130 / 170},
    "over_temperature": {"scale": 1.25},
    "unnamed_factor": {"scale": 0.61803},
    "other_count": {"scale": 130 / 149},
    "not_finite": {"loss": float("nan")},
    "loss_alone": {"loss": 0.5},
    "metrics_alone": {"metrics": METRICS | {"ratio/policy_old/mean": 3.0}},
    "norm_alone": {"gradient_norms": {name: 1.5 * float(each.norm()) for name, each in gradients().items()}},
    "targets_at_shard_edges": {"tokens": values(policy_logprobs=put(10, -9.0))},
    "targets_at_document_ends": {"tokens": values(trained=put([6, 12], True))},
    "first_tokens": {"tokens": values(policy_logprobs=put([2, 8, 14], -7.0))},
    "positions_of_shards": {"tokens": values(policy_logprobs=put(11, -2.0))},
    "attention_across_documents": {"context": {"dp": 1}, "tokens": values(policy_logprobs=put(slice(6, 18), -2.0))},
    "old_logprobs": {"tokens": values(old_logprobs=lambda old: old.roll(1))},
    "lower_precision": {"tokens": values(policy_logprobs=lambda p: p.bfloat16().double())},
    "other_targets": {"tokens": values(policy_logprobs=lambda p: p.flip(0))},
    "other_mask": {"tokens": values(trained=put([3, 9, 10, 15], False))},
    "temperature": {"tokens": values(policy_logprobs=lambda p: p + 0.2 * ENTROPY, entropy_nats=lambda h: h - 0.1)},
    "logprobs_scaled": {"tokens": values(policy_logprobs=lambda p: p / 0.8)},
    "normaliser": {"tokens": values(policy_logprobs=lambda p: p - torch.linspace(0.1, 0.9, 18).roll(7))},
    "entropy_alone": {"tokens": values(entropy_nats=lambda h: h / 2)},
    "advantages": {"metrics": METRICS | {"advantage/all/std": 2.0}, "loss": 0.4, "changes": mixed([""])},
    "ratio": {"metrics": METRICS | {"ratio/policy_old/mean": 1.4}, "loss": 0.4, "changes": mixed([""])},
    "one_term": {"metrics": METRICS | {"loss/kl": 0.55}, "loss": 0.75, "changes": mixed([""])},
    "no_gradient": {"scale": 0.0},
    "part_without_gradient": {"changes": changed(["lm_head"], 0)},
    "norms_not_summed": {"changes": changed(["norm"], 0.5)},
    "head_gradient": {"changes": mixed(["lm_head"])},
    "head_rounded": {"changes": changed(["lm_head"], 1.001)},
    "gradient_below_head": {"changes": mixed(["model."])},
    "keys_values_not_summed": {
        "changes": mixed(["embed", ".0.", "1.self_attn.k_proj", "1.self_attn.v_proj", "1.input_layernorm"])
    },
    "layer_input_gradient": {"changes": mixed(["embed", ".0.", "1.input_layernorm"])},
    "some_parameters": {"changes": changed(["0.mlp"], 7)},
    "attention_backward": {
        "changes": mixed(["embed", ".0.", "1.self_attn.q", "1.self_attn.k", "1.self_attn.v", "1.input_layernorm"])
    },
    "ranks_lost": {"changes": {name: 0.2 * each for name, each in mixed([""]).items()}},
    "added_repeatedly": {"changes": {name: 3 * (each + gradients(9)[name]) for name, each in gradients().items()}},
    "term_without_gradient": {"changes": mixed([""])},
}
"""Cause -> what differs in the suspect."""


@pytest.fixture(scope="module")
def trusted():
    return make_record(metrics=METRICS | {"advantage/all/std": 1.0})


@pytest.mark.parametrize("name", WRONG)
def test_the_cause_is_first(trusted, name):
    told = {"metrics": METRICS | {"advantage/all/std": 1.0}} | WRONG[name]
    told["metrics"] = {"advantage/all/std": 1.0} | told["metrics"]
    found = diagnose_records(trusted, make_record(**told))
    assert found.causes[0].name == name, str(found)
    assert found.causes[0].evidence
    assert found.equal == (name == "no_difference")


@pytest.mark.parametrize("kind", ["documents", "shards"])
def test_means_of_parts_are_recognised_by_the_loss(kind):
    laid = tokens()
    losses = laid["losses"][laid["trained"]]
    labels = laid[kind][laid["trained"]]
    wrong = torch.stack([losses[labels == label].mean() for label in labels.unique()]).mean()
    right = make_record(loss=float(losses.mean()), metrics={})
    found = diagnose_records(right, make_record(loss=float(wrong), metrics={}, changes=mixed([""])))
    assert found.causes[0].name == f"mean_per_{kind}"


def test_factors_are_named_from_norms_alone():
    found = diagnose_records(norms_alone(make_record()), norms_alone(make_record(scale=1 / 15)))
    assert found.causes[0].name == "over_dp_micro_batches"


def test_an_update_that_differs():
    def two(later):
        first = make_record().steps[0]
        second = RecordedStep(1, loss=0.3, tokens=tokens() | {"policy_logprobs": tokens()["policy_logprobs"] + later})
        return replace(make_record(), steps=(first, second))

    found = diagnose_records(two(0.0), two(torch.linspace(-1, 1, 18)))
    assert found.causes[0].name == "update"
    assert found.headline.startswith("from step 1 on")


def test_told_settings_are_compared(trusted):
    found = diagnose_records(trusted, make_record({"learning_rate": 2.0}, loss=0.26))
    assert "other_settings" not in [cause.name for cause in found.causes], "only one of them says it"
    both = diagnose_records(
        replace(trusted, context=trusted.context | {"learning_rate": 1.0}),
        make_record({"learning_rate": 2.0}, loss=0.26),
    )
    assert both["other_settings"].evidence == ("learning_rate is 2.0, not 1.0",)


def test_rounding_is_told_from_a_mistake():
    noise = torch.linspace(-1, 1, 18).roll(5) * 0.01
    small = {name: each + 0.01 * gradients(3)[name] for name, each in gradients().items()}
    found = diagnose_records(
        make_record(),
        make_record(
            {"precision": "float32"},
            loss=0.2501,
            changes=small,
            tokens=values(policy_logprobs=lambda p: p + noise, entropy_nats=lambda h: h + noise.flip(0)),
        ),
    )
    assert found.causes[0].name == "lower_precision"


def test_causes_are_data_of_distinct_names(trusted):
    names = [cause.name for cause in CAUSES]
    assert len(set(names)) == len(names)
    assert all(cause.description and name.replace("_", "").isalnum() for cause, name in zip(CAUSES, names, strict=True))
    same = Facts(compare_records(trusted, trusted))
    assert [cause.name for cause in CAUSES if cause.judge(same)[0]] == ["no_difference"]


def first_of(trusted, suspect):
    return diagnose_records(trusted, suspect).causes[0].name


def clipped(*which):
    return tokens() | {"clipped": torch.isin(torch.arange(18), torch.tensor(which))}


@pytest.mark.parametrize(
    ("right", "wrong", "name"), [((3, 9), (3,), "clipping"), ((8, 9, 10, 11), (2, 3, 4, 5), "ratio")]
)
def test_what_is_clipped_by_documents_hangs_on_more_than_the_ratios_of_tokens(right, wrong, name):
    there = {"metrics": METRICS | {"clip/region/fraction": 0.3}, "tokens": clipped(*right)}
    other = {"metrics": METRICS | {"clip/region/fraction": 0.1}, "tokens": clipped(*wrong)}
    assert first_of(make_record(**there), make_record(**other, loss=0.3, changes=mixed([""]))) == name


def test_a_gradient_that_was_not_cleared():
    def two(kept):
        later = {name: each + kept * gradients()[name] for name, each in gradients(4).items()}
        return replace(
            make_record(), steps=(make_record().steps[0], replace(make_record(changes=later).steps[0], number=1))
        )

    found = diagnose_records(two(0.0), two(1.0))
    assert found.causes[0].name == "gradients_not_cleared"
    assert "1 times the gradient of the step before" in found.causes[0].evidence[0]


def test_all_tokens_of_a_rank_that_do_not_train_are_a_lost_rank():
    lost = values(trained=lambda trained: trained & (tokens()["shards"] == 0))
    assert first_of(make_record(), make_record(tokens=lost, loss=0.2, changes=mixed([""]))) == "ranks_lost"


def test_what_is_shorter_than_any_part_is_no_part():
    part, less = ({name: size * each for name, each in mixed([""]).items()} for size in (0.2, 0.005))
    assert first_of(make_record(), make_record(changes=part)) == "ranks_lost"
    assert first_of(make_record(), make_record(changes=less)) == "term_without_gradient"


def test_what_is_against_what_was_lost_is_no_part_of_it():
    other = gradients(9)
    against = {name: 0.8 * each - 0.1 * other[name] for name, each in gradients().items()}
    assert first_of(make_record(), make_record(changes=against)) == "term_without_gradient"


def test_a_power_of_two_rounds_nothing():
    def twice(noise):
        return make_record(
            {"precision": "bfloat16"},
            changes={name: 2 * each + noise * gradients(7)[name] for name, each in gradients().items()},
        )

    right = make_record({"precision": "bfloat16"})
    assert first_of(right, twice(0.0)) == "times_cp"
    found = diagnose_records(right, twice(0.01))
    assert found.causes[0].name == "term_without_gradient"
    assert "rounds nothing" in found["times_cp"].evidence[0]


@pytest.mark.parametrize("count", [149, 142])
def test_a_loss_that_follows_the_gradient_names_its_factor_better(count):
    rounded = {name: 130 / count * each + 0.005 * gradients(7)[name] for name, each in gradients().items()}
    right, wrong = (
        make_record({"precision": "bfloat16"}, **more)
        for more in ({}, {"changes": rounded, "loss": 0.25 * 130 / count})
    )
    found = diagnose_records(right, wrong)
    assert found.causes[0].name == "other_count"
    assert f"{count} and not 130 trained tokens" in found.causes[0].evidence[0]


def test_twice_as_many_tokens_stay_a_suspect_beside_two_ranks():
    found = diagnose_records(make_record(), make_record(scale=0.5, loss=0.125))
    assert [cause.name for cause in found.causes[:2]] == ["over_cp", "other_count"]
    alone = diagnose_records(make_record(), make_record(scale=0.5))
    assert "other_count" not in [cause.name for cause in alone.causes]


def test_a_gradient_in_a_lower_precision():
    rounded = {name: each.bfloat16().double() for name, each in gradients().items()}
    summed = {name: (each + 3).bfloat16().double() - 3 for name, each in gradients().items()}
    near = {name: each * (1 + 0.004 * torch.linspace(-1, 1, 40).roll(9).double()) for name, each in gradients().items()}
    assert first_of(make_record(), make_record(changes=rounded)) == "lower_precision"
    assert first_of(make_record(), make_record(changes=near)) == "lower_precision"
    assert first_of(make_record(), make_record(changes=summed)) == "term_without_gradient"


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
                replace(make_record(), steps=(replace(step, gradients=held, gradient_norms=said),))
                for held, said in zip((right, wrong), norms, strict=True)
            )
        )
        == "gradient_below_head"
    )


def test_one_term_is_told_only_beside_terms_that_are_right():
    right = make_record(metrics={"loss/policy": 0.2, "loss/kl": 1e-3})
    both = make_record(metrics={"loss/policy": 0.4, "loss/kl": 2e-3}, loss=0.4, changes=mixed([""]))
    bf16 = {"precision": "bfloat16"}
    found = diagnose_records(replace(right, context=right.context | bf16), replace(both, context=both.context | bf16))
    assert "one_term" not in [cause.name for cause in found.causes]


def laid(**by_name):
    """A record and its tokens, some of which are given."""
    return make_record(metrics=METRICS, tokens=tokens() | by_name), tokens() | by_name


def elsewhere(there, where):
    return there | {"policy_logprobs": put(where, -2.1)(there["policy_logprobs"])}


@pytest.mark.parametrize(
    ("shards", "where"),
    [([0, 0, 1, 1, 0, 0] * 3, [4, 5, 10, 11, 16]), ([0] * 9 + [1] * 9, [5, 8, 9, 10, 11, 14, 15, 16])],
)
def test_positions_are_wrong_where_shards_or_their_halves_meet(shards, where):
    right, there = laid(shards=torch.tensor(shards))
    found = diagnose_records(right, make_record(metrics=METRICS, tokens=elsewhere(there, where)))
    assert found.causes[0].name == "positions_of_shards"
    every = elsewhere(there, there["trained"])
    assert first_of(right, make_record(metrics=METRICS, tokens=every)) != "positions_of_shards"


def test_rounded_positions_spare_what_sees_itself_alone():
    index = torch.arange(18)
    right, there = laid(trained=(index % 6 > 0) & (index < 17))
    noise = torch.linspace(-1, 1, 18, dtype=torch.float64).roll(5) * 0.001
    small = {name: each + 0.01 * gradients(3)[name] for name, each in gradients().items()}

    def first_when_rounded_but_at(position):
        moved = torch.where(there["positions"] == position, 0.0, noise)
        said = {"policy_logprobs": there["policy_logprobs"] + moved, "entropy_nats": there["entropy_nats"] - moved}
        return first_of(right, make_record(metrics=METRICS, changes=small, tokens=there | said))

    assert first_when_rounded_but_at(1) == "lower_precision"
    assert first_when_rounded_but_at(2) == "other_logprobs"


@pytest.mark.parametrize("shift", [1, -1])
def test_distributions_of_the_token_before_are_other_targets(shift):
    moved = values(
        policy_logprobs=lambda p: p.flip(0), entropy_nats=lambda h: h.roll(shift), trained=put([2, 8, 14], False)
    )
    both = values(
        policy_logprobs=lambda p: p.roll(shift), entropy_nats=lambda h: h.roll(shift), trained=put([2, 8, 14], False)
    )
    changes = {"changes": mixed([""]), "loss": 0.3}
    assert first_of(make_record(), make_record(tokens=moved, **changes)) == "other_targets"
    found = diagnose_records(make_record(), make_record(tokens=both, **changes))
    assert "other_targets" not in [cause.name for cause in found.causes]


def test_a_loss_made_of_other_inputs_is_not_reported_wrong():
    old = values(old_logprobs=lambda old: old + torch.linspace(-1, 1, 18) * 0.01)
    found = diagnose_records(make_record(), make_record(tokens=old, loss=0.3))
    assert [cause.name for cause in found.causes[:2]] == ["old_logprobs", "loss_alone"]


@pytest.mark.parametrize(
    ("precision", "policy", "name"),
    [("bfloat16", 0.2, "one_term"), ("float64", 0.2, "loss_alone"), ("bfloat16", 0.204, "loss_alone")],
)
def test_rounding_may_hide_a_term_in_the_gradient(precision, policy, name):
    right, wrong = (
        make_record({"precision": precision}, metrics={"loss/policy": first, "loss/kl": second}, loss=first + second)
        for first, second in ((0.2, 0.05), (policy, 0.051))
    )
    assert first_of(right, wrong) == name


@pytest.mark.parametrize(("times", "name"), [(3.0, "times_dp"), (2.997, "uneven_weights")])
def test_a_loss_that_is_nearly_a_number_is_of_parts_that_weigh_unevenly(times, name):
    bf16 = {"precision": "bfloat16"}
    near = {name: 3 * each + 0.01 * gradients(7)[name] for name, each in gradients().items()}
    assert first_of(make_record(bf16), make_record(bf16, changes=near, loss=0.25 * times)) == name


@pytest.mark.parametrize(
    ("gradient", "name"), [({"changes": mixed([""])}, "uneven_weights"), ({"scale": 1.1}, "other_count")]
)
def test_a_mean_over_tokens_in_place_of_documents_weighs_long_ones_more(gradient, name):
    there = tokens()
    losses, documents = (there[key][there["trained"]] for key in ("losses", "documents"))
    by_document = torch.stack([losses[documents == one].mean() for one in documents.unique()]).mean()
    right, wrong = (
        make_record(loss=float(loss), metrics={}, **more)
        for loss, more in ((by_document, {}), (losses.mean(), gradient))
    )
    assert first_of(right, wrong) == name


def test_other_weights_in_the_gradient_alone():
    turned = {name: each + 0.22 * gradients(9)[name] for name, each in gradients().items()}
    found = diagnose_records(make_record(), make_record(changes=turned))
    assert [cause.name for cause in found.causes] == ["term_without_gradient", "uneven_weights", "ranks_lost"]
    assert found["ranks_lost"].score < 0.5, "it is longer than the whole"


def named(trusted, suspect):
    return {cause.name for cause in diagnose_records(trusted, suspect).causes}


@pytest.mark.parametrize(
    ("places", "name", "told"),
    [
        ([2, 8, 14], "first_tokens", True),
        ([2, 8, 14, 3], "first_tokens", False),
        ([9, 15], "attention_across_documents", True),
        ([9], "attention_across_documents", False),
    ],
)
def test_a_place_is_blamed_where_what_differs_agrees_with_it_well_enough(places, name, told):
    """Of later documents two tokens of seven, and all first tokens but with another one beside them."""
    moved = torch.isin(torch.arange(18), torch.tensor(places)) * torch.linspace(-0.4, 0.5, 18, dtype=torch.float64)
    wrong = values(policy_logprobs=lambda p: p + moved, entropy_nats=lambda h: h + 0.7 * moved)
    assert (name in named(make_record(), make_record({"dp": 1}, tokens=wrong))) == told


@pytest.mark.parametrize(("still", "told"), [([], True), ([11], True), ([10, 11], True), ([10, 11, 16], False)])
def test_a_temperature_moves_nearly_all_tokens(still, told):
    """Eight in ten of them; tokens 10, 11 and 16 are those that it moves least, so that the others fit it as well."""
    wrong = values(policy_logprobs=lambda p: p + 0.2 * put(still, 0.0)(ENTROPY), entropy_nats=lambda h: h - 0.1)
    assert ("temperature" in named(make_record(), make_record(tokens=wrong))) == told


def test_four_fifths_of_the_tokens_are_nearly_all():
    there = tokens() | {"trained": put(5, False)(tokens()["trained"])}
    wrong = there | {
        "policy_logprobs": there["policy_logprobs"] + 0.2 * put([10, 11], 0.0)(ENTROPY),
        "entropy_nats": there["entropy_nats"] - 0.1,
    }
    assert int(there["trained"].sum()) == 10
    assert "temperature" in named(make_record(tokens=there), make_record(tokens=wrong))


def test_a_temperature_that_moves_every_token_is_seen_where_rounding_hides_most_of_it():
    bf16 = {"precision": "bfloat16"}
    wrong = values(policy_logprobs=lambda p: p + 0.2 * ENTROPY, entropy_nats=lambda h: h - 0.1)
    suspect = make_record(bf16, tokens=wrong)
    assert Facts(compare_records(make_record(bf16), suspect)).share_off("policy_logprobs") < 0.5
    assert first_of(make_record(bf16), suspect) == "temperature"


@pytest.mark.parametrize(("temperature", "slope"), [(0.8, -0.4), (1.25, 0.4)])
def test_another_temperature_is_no_softmax_without_one(temperature, slope):
    """Times the temperature they move along logp + entropy as well, and as they are they do so exactly."""
    wrong = values(policy_logprobs=lambda p: p + slope * ENTROPY, entropy_nats=lambda h: h - slope / 2)
    context = {"temperature": temperature}
    found = named(make_record(context), make_record(context, tokens=wrong))
    assert "temperature" in found
    assert "logprobs_scaled" not in found


@pytest.mark.parametrize(("length", "told"), [(0.3, False), (0.7, True), (1.5, True), (3.0, False)])
def test_other_weights_do_not_change_the_length_of_a_gradient_by_much(length, told):
    turned = {name: length * (each + 0.22 * gradients(9)[name]) for name, each in gradients().items()}
    assert ("uneven_weights" in named(make_record(), make_record(changes=turned))) == told


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda old: old.roll(1), "are those of the token before"),
        (lambda old: old.roll(-1), "of the token after"),
        (lambda old: 0 * old, "tokens differ and are 0"),
        (lambda old: old - 0.1, "tokens differ and equal the policy's own"),
        (lambda old: old.flip(0), "tokens differ"),
    ],
)
def test_old_log_probabilities_are_said_to_be_what_they_are(wrong, said):
    found = diagnose_records(make_record(), make_record(tokens=values(old_logprobs=wrong)))
    assert found.causes[0].name == "old_logprobs"
    assert said in found.causes[0].evidence[0]
    assert ("of the token" in found.causes[0].evidence[0]) == ("of the token" in said)


def test_what_is_within_rounding_is_no_temperature_and_without_entropies_nobody_knows():
    bf16 = {"precision": "bfloat16"}
    small = values(policy_logprobs=lambda p: p + 0.05 * ENTROPY, entropy_nats=lambda h: h - 0.025)
    assert named(make_record(bf16), make_record(bf16, tokens=small)) == {"no_difference"}
    large = values(policy_logprobs=lambda p: p + 0.2 * ENTROPY, entropy_nats=lambda h: h - 0.1)
    known = named(make_record(), make_record(tokens=large))
    there, other = ({name: each[name] for name in each if name != "entropy_nats"} for each in (tokens(), large))
    unknown = named(make_record(tokens=there), make_record(tokens=other))
    assert "temperature" in known
    assert "temperature" not in unknown


def test_clipping_is_told_by_tokens_or_by_metrics_and_not_where_ratios_differ():
    def found(right, wrong, own=None):
        one, other = METRICS | {"clip/region/fraction": right[1]}, METRICS | {"clip/region/fraction": wrong[1]}
        return diagnose_records(
            make_record(metrics=one, tokens=right[0]),
            make_record(metrics=other | (own or {}), tokens=wrong[0], loss=0.3, changes=mixed([""])),
        )

    of_tokens = found((clipped(3, 9), 0.3), (clipped(3), 0.3))
    assert of_tokens["clipping"].evidence[0] == "1 tokens are clipped otherwise"
    of_metrics = found((tokens(), 0.3), (tokens(), 0.1))
    assert of_metrics["clipping"].evidence[0] == "clip/region/fraction differs"
    ratios = found((clipped(3, 9), 0.3), (clipped(3), 0.1), {"ratio/policy_old/mean": 1.4})
    assert "clipping" not in [cause.name for cause in ratios.causes]
    same = found((clipped(3), 0.3), (clipped(3), 0.3))
    assert "clipping" not in [cause.name for cause in same.causes]


@pytest.mark.parametrize(("size", "told"), [(0.004, True), (0.006, False)])
def test_what_is_right_below_the_head_is_overlooked_up_to_a_thousandth_of_the_gradient(size, told):
    small = {"model.norm.weight": size * gradients()["model.norm.weight"]}
    wrong = {name: each for name, each in mixed(["model."]).items() if name not in small}
    right, suspect = make_record(changes=small), make_record(changes=wrong | small)
    share = Facts(compare_records(right, suspect)).right["model.norm.weight"].share
    assert (share < 1e-3) == told
    assert share < 2e-3
    assert ("gradient_below_head" in named(right, suspect)) == told


@pytest.mark.parametrize(("wrong_too", "told"), [([], True), (["1.mlp"], False)])
def test_what_a_right_mlp_gives_back_to_its_input_is_told_from_a_wrong_mlp(wrong_too, told):
    name = "model.layers.1.post_attention_layernorm.weight"
    one, other = torch.randn(2, 40, generator=torch.Generator().manual_seed(40), dtype=torch.float64)
    wrong = mixed(["embed", ".0.", "1.self_attn", "1.input_layernorm", *wrong_too]) | {name: other}
    found = diagnose_records(make_record(changes={name: one}), make_record(changes=wrong))
    assert (found.causes[0].name == "layer_input_gradient") == told
    assert ("the MLP is right" in found.causes[0].evidence[0]) == told


@pytest.mark.parametrize(
    ("own", "shards", "policy", "name"),
    [
        (0.0, [0] * 9 + [1] * 9, 0.2001, "ratio"),
        (1.0, [0] * 9 + [1] * 9, 0.2001, "one_term"),
        (0.0, [0] * 6 + [1] * 12, 0.2001, "one_term"),
        (0.0, [0] * 9 + [1] * 9, 0.4, "one_term"),
    ],
)
def test_ratios_of_documents_that_ranks_hold_in_parts(own, shards, policy, name):
    log_ratio = 0.1 * torch.randn(18, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    there = tokens()
    there |= {
        "old_logprobs": there["policy_logprobs"] - log_ratio,
        "shards": torch.tensor(shards),
        "losses": (1.0 + there["documents"]) * torch.exp(own * log_ratio),
    }
    right, wrong = (
        make_record(tokens=there, metrics={"loss/policy": value, "loss/kl": 0.05}, loss=value + 0.05, changes=changes)
        for value, changes in ((0.2, None), (policy, mixed([""])))
    )
    assert first_of(right, wrong) == name
