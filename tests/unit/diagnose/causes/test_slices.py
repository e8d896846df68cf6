"""Causes where tokens, norms and layers are cut over ranks."""

import pytest
import torch

from tests.helpers.hand_records import gradients, make_record, mixed, put, tokens, values
from workbench.diagnose.diagnosis import diagnose_records

SLICED = {"tp": 2, "sequence_parallel": True, "micro_batches": 1, "dp": 1}
SLICES = torch.arange(18) // 5


def first(trusted, suspect):
    cause = diagnose_records(trusted, suspect).causes[0]
    return cause.name, " ".join(cause.evidence)


def names(trusted, suspect):
    return [cause.name for cause in diagnose_records(trusted, suspect).causes]


def test_norms_of_one_slice():
    norms = {name: float(each.norm()) for name, each in gradients().items()}
    short = {name: float(gradients()[name][:20].norm()) for name in list(norms)[:3]}
    name, evidence = first(make_record(), make_record(gradient_norms=norms | short))
    assert name == "norm_of_slice"
    assert "first of 2 slices" in evidence
    one_is_no_slice = (
        norms
        | short
        | {
            "lm_head.weight": short["model.embed_tokens.weight"]
            / norms["model.embed_tokens.weight"]
            * norms["lm_head.weight"]
        }
    )
    assert first(make_record(), make_record(gradient_norms=one_is_no_slice))[0] == "norm_alone"


def sliced(**changes):
    context, own = dict(SLICED), tokens() | {"slices": SLICES}
    for name, where in changes.items():
        own[name] = put(where, -9.0)(own[name])
    return make_record(context, tokens=own, changes=mixed([""]) if changes else {}, loss=0.4 if changes else 0.25)


def test_slices_in_place_of_others():
    """Slice 2 is tokens 10 to 14; 15 and 16 are behind it in their document, and tokens 12, 13 and 17 do not train."""
    name, evidence = first(sliced(), sliced(policy_logprobs=[10, 11, 14, 15, 16], entropy_nats=[10, 11, 14, 15, 16]))
    assert name == "other_slices"
    assert "slices 2 of 4" in evidence


@pytest.mark.parametrize("where", [[2, 10, 11, 14, 15, 16], [14]])
def test_differences_elsewhere_and_in_few_of_the_tokens_are_no_slices(where):
    assert "other_slices" not in names(sliced(), sliced(policy_logprobs=where, entropy_nats=where))


def test_every_token_of_every_document():
    everywhere = [place for place in range(18) if place % 6 > 1]
    assert "hidden_of_other_ranks" in names(sliced(), sliced(policy_logprobs=everywhere))
    plain = make_record(tokens=values(policy_logprobs=put(everywhere, -9.0)), loss=0.4)
    assert "hidden_of_other_ranks" not in names(make_record(), plain)


def in_rows(where):
    """Three documents, each in a micro-batch of its own, of which the second rank has the last two tokens."""
    own = tokens() | {"rows": torch.arange(18) // 6, "places": torch.arange(18) % 6 - 1}
    own["shards"] = (torch.arange(18) % 6 > 3).long()
    if where:
        own["policy_logprobs"] = put(where, -9.0)(own["policy_logprobs"])
    changes = mixed([""]) if where else {}
    return make_record({"dp": 1, "micro_batches": 3}, tokens=own, changes=changes, loss=0.4 if where else 0.25)


def test_attention_that_is_right_in_the_first_micro_batch():
    assert first(in_rows([]), in_rows([10, 11, 16, 17]))[0] == "attention_of_first_row"
    for where in ([4, 5, 10, 11, 16, 17], [9, 10, 11, 16, 17]):
        assert "attention_of_first_row" not in names(in_rows([]), in_rows(where))


def test_layers_that_are_recomputed_from_another_input():
    wrong = mixed(["embed", "layers"])
    recomputed = {"checkpointing": True}
    assert "recomputed" in names(make_record(recomputed), make_record(recomputed, changes=wrong))
    assert "recomputed" not in names(make_record(), make_record(changes=wrong))


def test_ends_of_a_pipeline_that_are_not_summed():
    untied = gradients()
    tied = {name: each for name, each in untied.items() if name != "lm_head.weight"}
    norms = {name: float(each.norm()) for name, each in tied.items()}
    wrong = tied | mixed(["embed"])
    trusted = make_record({"pp": 2}, gradients=tied, gradient_norms=norms)
    other = norms | {"model.embed_tokens.weight": float(wrong["model.embed_tokens.weight"].norm())}
    assert first(trusted, make_record({"pp": 2}, gradients=wrong, gradient_norms=other))[0] == "ends_not_summed"


def test_layers_that_have_the_weights_of_others():
    norms = {name: 1.0 + number / 7 for number, name in enumerate(gradients())}

    def record(**changed):
        weights = norms | {name.replace("__", "."): norm for name, norm in changed.items()}
        return make_record({"pp": 2}, weight_norms=weights, tokens=values(policy_logprobs=lambda p: p - 1), loss=0.4)

    trusted = make_record({"pp": 2}, weight_norms=norms)
    of_first = {name.replace(".1.", ".0."): name for name in norms if ".1." in name}
    copied = {name.replace(".", "__"): norms[first] for first, name in of_first.items() if first in norms}
    name, evidence = first(trusted, record(**copied))
    assert name == "other_layers"
    assert "layer 1 those of layer 0" in evidence
    some = dict(list(copied.items())[:-1]) | {list(copied)[-1]: 0.123}
    third = {name.replace(".1.", ".2."): norm + 0.05 for name, norm in norms.items() if ".1." in name}
    norms |= third  # of which one weight is that of the first layer, and all others those of the second
    trusted = make_record({"pp": 2}, weight_norms=norms)
    mixed_up = {name: norms[name.replace(".2.", ".1.")] for name in third}
    mixed_up[min(third)] = norms[min(third).replace(".2.", ".0.")]
    two_layers = {name.replace(".", "__"): norm for name, norm in mixed_up.items()}
    for other in (some, {}, {"lm_head__weight": 5.0}, two_layers):
        assert "other_layers" not in names(trusted, record(**other))
