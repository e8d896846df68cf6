"""Causes in tokens and terms of the loss: which tokens differ tells what is wrong."""

from dataclasses import replace

import pytest
import torch

from tests.helpers.hand_records import (
    ENTROPY,
    METRICS,
    gradients,
    make_record,
    mixed,
    put,
    tokens,
    values,
)
from workbench.diagnose.diagnosis import diagnose_records
from workbench.diagnose.evidence import compare_records
from workbench.diagnose.facts import Facts
from workbench.diagnose.record import Record, RecordedStep


def first_of(trusted, suspect):
    return diagnose_records(trusted, suspect).causes[0].name


def clipped(*which):
    return tokens() | {"clipped": torch.isin(torch.arange(18), torch.tensor(which))}


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
    diagnosis = diagnose_records(right, make_record(metrics=METRICS, tokens=elsewhere(there, where)))
    assert diagnosis.causes[0].name == "positions_of_shards"
    every = elsewhere(there, there["trained"])
    assert first_of(right, make_record(metrics=METRICS, tokens=every)) != "positions_of_shards"


def test_rounded_positions_do_not_affect_isolated_tokens():
    index = torch.arange(18)
    right, there = laid(trained=(index % 6 > 0) & (index < 17))
    noise = torch.linspace(-1, 1, 18, dtype=torch.float64).roll(5) * 0.001
    small = {name: each + 0.01 * gradients(3)[name] for name, each in gradients().items()}

    def first_when_rounded_but_at(position):
        moved = torch.where(there["positions"] == position, 0.0, noise)
        text = {"policy_logprobs": there["policy_logprobs"] + moved, "entropy_nats": there["entropy_nats"] - moved}
        return first_of(right, make_record(metrics=METRICS, changes=small, tokens=there | text))

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
    diagnosis = diagnose_records(make_record(), make_record(tokens=both, **changes))
    assert "other_targets" not in [cause.name for cause in diagnosis.causes]


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
def test_a_place_is_blamed_if_the_differences_agree_with_it(places, name, told):
    """Of later documents two tokens of seven, and all first tokens except those next to another one."""
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


def test_a_temperature_is_detected_although_rounding_hides_most_of_it():
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
    metrics = named(make_record(context), make_record(context, tokens=wrong))
    assert "temperature" in metrics
    assert "logprobs_scaled" not in metrics


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
def test_wrong_old_log_probabilities_are_named(wrong, said):
    diagnosis = diagnose_records(make_record(), make_record(tokens=values(old_logprobs=wrong)))
    assert diagnosis.causes[0].name == "old_logprobs"
    assert said in diagnosis.causes[0].evidence[0]
    assert ("of the token" in diagnosis.causes[0].evidence[0]) == ("of the token" in said)


def test_a_difference_within_rounding_is_no_temperature():
    bf16 = {"precision": "bfloat16"}
    small = values(policy_logprobs=lambda p: p + 0.05 * ENTROPY, entropy_nats=lambda h: h - 0.025)
    assert named(make_record(bf16), make_record(bf16, tokens=small)) == {"no_difference"}
    large = values(policy_logprobs=lambda p: p + 0.2 * ENTROPY, entropy_nats=lambda h: h - 0.1)
    known = named(make_record(), make_record(tokens=large))
    there, other = ({name: each[name] for name in each if name != "entropy_nats"} for each in (tokens(), large))
    unknown = named(make_record(tokens=there), make_record(tokens=other))
    assert "temperature" in known
    assert "temperature" not in unknown


def packed(moved=0.0, positions=None):
    """Six documents in two rows, whose later ones have other log-probabilities."""
    documents = torch.arange(6).repeat_interleave(4)
    rows = (documents >= 3).long()
    later = (documents != 0) & (documents != 3)
    trained = torch.arange(24) % 4 > 0
    draw = torch.Generator().manual_seed(0)
    policy = -torch.rand(24, generator=draw) - later * moved * torch.randn(24, generator=draw)
    values = {"documents": documents, "rows": rows, "trained": trained, "policy_logprobs": policy}
    kept = {} if positions is None else {"positions": torch.tensor(positions)}
    gradients = {"a": 1.0 + moved, "b": 2.0 - moved}
    counts = {"documents": 6.0, "trained_tokens": 18.0}
    step = RecordedStep(0, loss=0.5 + moved, gradient_norms=gradients, tokens=values | kept, counts=counts)
    return Record({"precision": "float32", "micro_batches": 2}, [step])


def test_later_documents_of_a_row_tell_attention_from_positions_where_these_were_noted():
    restarting, running = [0, 1, 2, 3] * 6, list(range(24))
    alike = diagnose_records(packed(positions=restarting), packed(0.3, positions=restarting))
    assert (alike.causes[0].name, alike.causes[0].score > 0.8) == ("attention_across_documents", True)
    other = diagnose_records(packed(positions=restarting), packed(0.3, positions=running))
    assert other.causes[0].name == "position_ids"
    unknown = diagnose_records(packed(), packed(0.3))
    assert [cause.name for cause in unknown.causes[:2]] == ["attention_across_documents", "position_ids"]
    assert unknown.causes[0].score < 0.5, "both are possible, and neither is told"


# ---- documents and micro-batches of a foreign record -----------------------------------------------------------

LENGTHS = (3, 6, 5, 6, 4, 6)


def padded(moved=(), gone=(), rows=(0, 0, 1, 1, 2, 2), shift=0, counts=None, renamed=False, **changes):
    """Six documents of several lengths in three micro-batches; some have other log-probabilities, some are missing."""
    documents = torch.repeat_interleave(torch.arange(6), torch.tensor(LENGTHS))
    draw = torch.Generator().manual_seed(0)
    size = len(documents)
    first = torch.cat([torch.arange(length) == 0 for length in LENGTHS])
    policy = -torch.rand(size, generator=draw, dtype=torch.float64)
    noise = 0.2 * torch.randn(size, generator=draw, dtype=torch.float64)
    kept = {
        "documents": documents,
        "rows": torch.tensor(rows)[documents],
        "trained": ~first,
        "policy_logprobs": policy + noise * torch.isin(documents, torch.tensor(moved, dtype=torch.long)),
        "old_logprobs": policy + 0.1,
        "ref_logprobs": policy - 0.2,
        "sampler_logprobs": policy + 0.05,
        "ratios": torch.rand(size, generator=draw, dtype=torch.float64),
        "clipped": torch.rand(size, generator=draw) < 0.3,
        "targets": torch.randint(50, (size,), generator=draw).roll(shift),
    }
    kept |= {name: function(kept) for name, function in changes.items()}
    for name in kept if gone else ():
        blank = -1 if name in ("documents", "rows") else 0
        kept[name] = torch.where(
            torch.isin(documents, torch.tensor(gone)), torch.full_like(kept[name], blank), kept[name]
        )
    if renamed:  # the last document is there twice, under two numbers
        last = {name: values[documents == 5] for name, values in kept.items()} | {"documents": torch.full((6,), 6)}
        kept = {name: torch.cat((values, last[name])) for name, values in kept.items()}
    factor = 1.0 + bool(renamed or moved or gone or shift or changes or counts)
    step = RecordedStep(
        0,
        loss=0.3 * factor,
        gradient_norms={"a": factor, "b": 2.0 / factor},
        counts={"documents": 6.0, "trained_tokens": 24.0} | (counts or {}),
        tokens=kept,
    )
    return Record({"precision": "float32", "micro_batches": 3}, [step])


@pytest.mark.parametrize(
    ("planted", "cause", "reason"),
    [
        ({"moved": (0, 2, 4)}, "attention_to_padding", "100% of the documents differ that are shorter"),
        ({"moved": (2, 3)}, "replicas_apart", "1 micro-batches differ in nearly every token, and those of the other 2"),
        ({"gone": (2, 3)}, "ranks_lost", "9 of 24 trained tokens are missing, all of 1 micro-batches"),
        ({"gone": (1, 2)}, "other_data", "9 of 24 trained tokens are missing"),
        ({"renamed": True, "counts": {"trained_tokens": 30.0}}, "other_data", "1 documents train that the trusted"),
        ({"shift": -1, "moved": range(6)}, "other_targets", "targets are those of the token after"),
        ({"counts": {"trained_tokens": 30.0}}, "other_mask", "30 tokens train, not 24, although the same are noted"),
        (
            {"ref_logprobs": lambda kept: kept["policy_logprobs"]},
            "ref_logprobs",
            "the reference's log-probabilities of 24 tokens differ and equal the policy's own",
        ),
        (
            {"sampler_logprobs": lambda kept: kept["sampler_logprobs"].roll(1)},
            "sampler_logprobs",
            "and are those of the token before",
        ),
        ({"ratios": lambda kept: kept["ratios"] + 0.5}, "ratio", "ratios of 24 tokens differ"),
    ],
)
def test_tokens_of_a_foreign_record_name_the_cause(planted, cause, reason):
    diagnosis = diagnose_records(padded(), padded(**planted))
    assert diagnosis.causes[0].name == cause, str(diagnosis)
    assert any(reason in each for each in diagnosis.causes[0].evidence), str(diagnosis)
    assert diagnosis.causes[0].score >= 0.8


def test_some_documents_of_some_micro_batches_are_neither_padding_nor_a_replica():
    for moved in ((1, 2), (0, 1, 2, 4)):  # of the last four, document 1 is the longest of its micro-batch
        names = [cause.name for cause in diagnose_records(padded(), padded(moved=moved)).causes]
        assert not {"attention_to_padding", "replicas_apart"} & set(names)


def test_parts_of_documents_in_several_micro_batches_are_shards():
    """Positions that restart in each part move what lies behind the first part of every document."""
    index = torch.arange(24)
    parts = {"documents": index // 8, "rows": index // 8 * 2 + (index % 8 > 3), "trained": index % 8 > 0}
    draw = torch.Generator().manual_seed(0)
    policy = -torch.rand(24, generator=draw, dtype=torch.float64)
    moved = policy + 0.3 * (index % 8 > 3) * torch.randn(24, generator=draw, dtype=torch.float64)

    def made(logprobs, loss):
        step = RecordedStep(
            0, loss=loss, gradient_norms={"a": loss, "b": 1 / loss}, tokens=parts | {"policy_logprobs": logprobs}
        )
        return Record({"precision": "float32", "cp": 2}, [step])

    diagnosis = diagnose_records(made(policy, 0.3), made(moved, 0.4))
    assert "positions_of_shards" in [cause.name for cause in diagnosis.causes[:2]], str(diagnosis)


def test_a_table_of_positions_tells_positions_that_run_on_from_attention():
    def with_table(record, last):
        table = torch.zeros(40, 3)
        table[:last] = 1.0
        step = replace(record.steps[0], gradients={"wpe.weight": table, "a": torch.ones(3)}, gradient_norms={})
        return replace(record, steps=(step,))

    right, wrong = with_table(packed(), 4), with_table(packed(0.3), 12)
    diagnosis = diagnose_records(right, wrong)
    assert diagnosis.causes[0].name == "position_ids", str(diagnosis)
    assert "rows of wpe.weight up to 11 have a gradient, not up to 3" in diagnosis.causes[0].evidence[0]


def test_first_tokens_that_train_are_targets_of_the_document_before():
    def made(places, loss):
        trained = values(trained=lambda trained: trained | torch.isin(torch.arange(18), torch.tensor(places)))
        return make_record(tokens=trained, loss=loss, changes=mixed([""]) if places else None)

    right = made((), 0.25)
    diagnosis = diagnose_records(right, made((6, 12), 0.4))
    assert diagnosis.causes[0].name == "targets_at_document_ends"
    assert diagnosis.causes[0].evidence[0].startswith("2 first tokens of documents train")
    assert diagnosis.causes[0].score > 0.9
    assert diagnose_records(right, made((6, 7), 0.4))["targets_at_document_ends"].score < 0.9


def test_documents_that_were_noted_and_train_now_are_another_mask_and_no_data():
    first = padded()
    masked = {"trained": lambda kept: kept["trained"] & (kept["documents"] != 5)}
    diagnosis = diagnose_records(padded(**masked), first)
    assert diagnosis.causes[0].name == "other_mask", str(diagnosis)


@pytest.mark.parametrize(("own", "cause"), [(False, "ranks_lost"), (True, "other_data")])
def test_what_is_left_of_a_step_is_divided_by_its_own_count_where_the_rest_was_not_given(own, cause):
    losses = {"losses": lambda kept: 1.0 + kept["trained"] * (kept["documents"] % 2)}

    def summed(record, count):
        tokens = record.steps[0].tokens
        step = replace(record.steps[0], loss=float(tokens["losses"][tokens["trained"].bool()].sum()) / count)
        return replace(record, steps=(step,))

    right, wrong = padded(**losses), padded(gone=(2, 3), **losses)
    left = int(wrong.steps[0].tokens["trained"].sum())
    diagnosis = diagnose_records(summed(right, 24), summed(wrong, left if own else 24))
    assert diagnosis.causes[0].name == cause, str(diagnosis)
