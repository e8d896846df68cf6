"""Terms of the loss: clipping, ratios, and one term of several."""

from dataclasses import replace

import pytest
import torch

from tests.helpers.hand_records import (
    METRICS,
    make_record,
    mixed,
    tokens,
)
from workbench.diagnose.diagnosis import diagnose_records


def first_of(trusted, suspect):
    return diagnose_records(trusted, suspect).causes[0].name


def clipped(*which):
    return tokens() | {"clipped": torch.isin(torch.arange(18), torch.tensor(which))}


@pytest.mark.parametrize(
    ("right", "wrong", "name"), [((3, 9), (3,), "clipping"), ((8, 9, 10, 11), (2, 3, 4, 5), "ratio")]
)
def test_clipping_by_documents_depends_on_more_than_token_ratios(right, wrong, name):
    there = {"metrics": METRICS | {"clip/region/fraction": 0.3}, "tokens": clipped(*right)}
    other = {"metrics": METRICS | {"clip/region/fraction": 0.1}, "tokens": clipped(*wrong)}
    assert first_of(make_record(**there), make_record(**other, loss=0.3, changes=mixed([""]))) == name


def test_one_term_is_blamed_only_if_other_terms_are_correct():
    right = make_record(metrics={"loss/policy": 0.2, "loss/kl": 1e-3})
    both = make_record(metrics={"loss/policy": 0.4, "loss/kl": 2e-3}, loss=0.4, changes=mixed([""]))
    bf16 = {"precision": "bfloat16"}
    diagnosis = diagnose_records(
        replace(right, context=right.context | bf16), replace(both, context=both.context | bf16)
    )
    assert "one_term" not in [cause.name for cause in diagnosis.causes]


def test_clipping_is_detected_by_tokens_or_metrics_if_ratios_agree():
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


@pytest.mark.parametrize(
    ("own", "shards", "policy", "name"),
    [
        (0.0, [0] * 9 + [1] * 9, 0.2001, "ratio"),
        (1.0, [0] * 9 + [1] * 9, 0.2001, "one_term"),
        (0.0, [0] * 6 + [1] * 12, 0.2001, "one_term"),
        (0.0, [0] * 9 + [1] * 9, 0.4, "one_term"),
    ],
)
def test_document_ratios_over_several_ranks(own, shards, policy, name):
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


def test_another_loss_that_multiplies_every_gradient_is_a_factor():
    other = tokens() | {"losses": tokens()["losses"] / 60}
    diagnosis = diagnose_records(make_record(), make_record(tokens=other, loss=0.25 / 60, scale=1 / 60))
    assert diagnosis.causes[0].name == "unnamed_factor", str(diagnosis)
    turned = diagnose_records(make_record(), make_record(tokens=other, loss=0.25 / 60, changes=mixed([""])))
    assert turned.causes[0].name == "other_loss", str(turned)


def test_the_loss_moves_by_what_its_only_noted_term_does():
    right = make_record(metrics={"loss/z": 0.05}, tokens={})
    dropped = make_record(metrics={"loss/z": 0.0}, tokens={}, loss=0.2, changes=mixed([""]))
    assert diagnose_records(right, dropped)["one_term"].score > 0.5
    other = make_record(metrics={"loss/z": 0.0}, tokens={}, loss=0.3, changes=mixed([""]))
    assert "one_term" not in [cause.name for cause in diagnose_records(right, other).causes]


def test_terms_that_move_by_factors_of_their_own_are_weighed_otherwise():
    right = make_record(metrics={"loss/distillation": 0.1, "loss/cross_entropy": 0.15}, tokens={})
    metrics = {"loss/distillation": 0.04, "loss/cross_entropy": 0.24}
    assert first_of(right, make_record(metrics=metrics, tokens={}, loss=0.28, changes=mixed([""]))) == "one_term"


@pytest.mark.parametrize(
    ("noted", "cause"), [(("advantages", "ref_logprobs"), "one_term"), (("ref_logprobs",), "other_loss")]
)
def test_values_of_a_loss_of_several_parts_that_nothing_explains_are_of_one_of_them(noted, cause):
    draw = torch.Generator().manual_seed(2)
    there = tokens() | {name: torch.rand(18, generator=draw, dtype=torch.float64) for name in noted}
    moved = there | {"losses": torch.rand(18, generator=draw, dtype=torch.float64)}
    right = make_record(tokens=there, metrics={})
    assert first_of(right, make_record(tokens=moved, metrics={}, loss=0.4, changes=mixed([""]))) == cause


def test_terms_of_right_values_differ_by_weights_of_tokens():
    right = make_record(metrics={"loss/policy": 0.1, "loss/kl": 0.15})
    wrong = make_record(metrics={"loss/policy": 0.04, "loss/kl": 0.24}, loss=0.28, changes=mixed([""]))
    assert first_of(right, wrong) == "uneven_weights"
