import itertools

import numpy as np
import pytest

from tests.helpers.system_batches import differing, packed, rectangle, with_logits
from tests.oracles.systems import fast_llm as oracle
from workbench.errors import SpecError
from workbench.specs.losses import LossSpec
from workbench.systems import loss_spec, replay, settings_for
from workbench.systems.translate import translation

FUNCTIONS = {
    "grpo": "LanguageModelGRPOLoss.combinable_forward_backward / grpo_metrics_core",
    "gspo": "fused_gspo_loss_forward_backward / compute_gspo_metrics",
}
PLAIN = {
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "logits_scale_factor": 1.0,
    "grad_output": 1.0,
    "divisor": 13.0,
    "num_documents_in_batch": 7,
}


def batch(seed, spread, *, square=False):
    made = rectangle(seed, spread=spread) if square else packed(seed, spread=spread)
    if square:
        made["document_index"] = np.repeat(np.arange(4)[:, None], 6, axis=1)
    arrays = with_logits(made, seed, spread=spread)
    index = arrays["document_index"]
    arrays["label_counts"] = np.bincount(index.reshape(-1), weights=(arrays["targets"] >= 0).reshape(-1))[index]
    return {
        name: arrays[name]
        for name in ("logits", "targets", "advantages", "old_logprobs", "document_index", "label_counts")
    }


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"epsilon_high": 0.28},
        {"epsilon_low": 0.01, "epsilon_high": 0.02},
        {"logits_scale_factor": 1.4},
        {"grad_output": 2.5},
        {"divisor": 3.0, "num_documents_in_batch": 5, "grad_output": 0.25},
    ],
    ids=str,
)
@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_policy_losses_match_fast_llm(kind, square, change):
    config = {**PLAIN, **change, **({"num_segments": 5} if kind == "gspo" else {})}
    for seed, spread in ((1, 0.01), (2, 0.3), (3, 2.0)):
        arrays = batch(seed, spread, square=square)
        if seed == 2:
            arrays["grad_logits_in"] = np.random.default_rng(9).standard_normal(arrays["logits"].shape)
        result = replay("fast_llm", "policy_loss_logits", FUNCTIONS[kind], config, arrays)
        assert differing(result, oracle.policy_loss(kind, config, arrays)) == [], seed


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_logits_of_untrained_tokens_do_not_matter(kind):
    arrays = batch(6, 0.3)
    expected = oracle.policy_loss(kind, PLAIN, arrays)
    for garbage in (np.nan, np.inf, -np.inf):
        arrays["logits"][arrays["targets"] < 0] = garbage
        assert differing(replay("fast_llm", "policy_loss_logits", FUNCTIONS[kind], PLAIN, arrays), expected) == []


def test_advantages_of_tokens_are_averaged_by_gspo():
    arrays = batch(4, 0.3)
    arrays["advantages"] = np.random.default_rng(4).standard_normal(arrays["advantages"].shape)
    for kind, function in FUNCTIONS.items():
        result = replay("fast_llm", "policy_loss_logits", function, PLAIN, arrays)
        assert differing(result, oracle.policy_loss(kind, PLAIN, arrays)) == [], kind


@pytest.mark.parametrize(
    ("form", "kind"),
    list(itertools.product(("labels", "logits", "probabilities"), ("cross_entropy", "forward_kl", "reverse_kl"))),
)
@pytest.mark.parametrize("change", [{}, {"logits_scale_factor": 1.3, "temperature": 0.6, "grad_output": 3.0}], ids=str)
def test_divergences(form, kind, change):
    rng = np.random.default_rng(5)
    logits, teacher = rng.standard_normal((2, 4, 7)), rng.standard_normal((2, 4, 7))
    labels = np.where(rng.random((2, 4)) < 0.7, rng.integers(0, 7, (2, 4)), -100)
    probabilities = np.exp(teacher) / np.exp(teacher).sum(-1, keepdims=True)
    config = {
        "target_format": form,
        "entropy_loss_type": kind,
        "logits_scale_factor": 1.0,
        "temperature": 1.0,
        "grad_output": 1.0,
        **change,
    }
    arrays = {"logits": logits, "target": {"labels": labels, "logits": teacher, "probabilities": probabilities}[form]}
    for masked in (False,) if form == "labels" else (False, True):
        given = arrays | ({"mask": rng.random((2, 4)) < 0.6} if masked else {})
        result = replay("fast_llm", "cross_entropy_family", "torch_entropy_loss_forward_backward", config, given)
        assert differing(result, oracle.entropy_loss(config, given)) == [], masked


@pytest.mark.parametrize("masked", [False, True])
def test_z_loss(masked):
    rng = np.random.default_rng(6)
    arrays = {"logits": 3 * rng.standard_normal((3, 5, 7)), **({"mask": rng.random((3, 5)) < 0.6} if masked else {})}
    config = {"logits_scale_factor": 0.7}
    assert differing(replay("fast_llm", "z_loss", "z_loss", config, arrays), oracle.z_loss(config, arrays)) == []


@pytest.mark.parametrize(
    "config", [{"beta": 0.1, "logits_scale_factor": 1.0}, {"beta": 1.0, "logits_scale_factor": 1.6}], ids=str
)
def test_one_sigmoid_of_all_pairs(config):
    rng = np.random.default_rng(7)
    arrays = {
        "logits": rng.standard_normal((2, 14, 6)),
        "ref_logits": rng.standard_normal((2, 14, 6)),
        "targets": rng.integers(-1, 6, (2, 14)),
    }
    config = {**config, "chosen_spans": [[[0, 3], [7, 8]], [[1, 5]]], "rejected_spans": [[[3, 6], [9, 13]], [[6, 14]]]}
    assert differing(replay("fast_llm", "dpo_packed", "dpo_loss", config, arrays), oracle.dpo(config, arrays)) == []


# ---- settings ----------------------------------------------------------------------------------------------------


def test_defaults():
    spec = loss_spec("fast_llm", {})
    assert (spec.surrogate.kind, spec.surrogate.clip_low, spec.surrogate.clip_high) == ("ppo", 0.2, 0.2)
    assert spec.denominator == "token"


@pytest.mark.parametrize(
    "settings", [{}, {"type": "gspo"}, {"type": "gspo", "epsilon_low": 3e-4, "weight": 0.5}], ids=str
)
def test_there_and_back(settings):
    spec = loss_spec("fast_llm", settings)
    assert loss_spec("fast_llm", settings_for("fast_llm", spec)) == spec


def test_unsupported_settings_are_refused():
    with pytest.raises(SpecError, match="its policy losses are grpo and gspo"):
        settings_for("fast_llm", LossSpec(name="cispo"))
    with pytest.raises(SpecError, match=r"entropy_coefficient = 0\.1"):
        settings_for("fast_llm", LossSpec(name="grpo", entropy_coefficient=0.1))
    with pytest.raises(SpecError, match="did you mean 'epsilon_low'"):
        loss_spec("fast_llm", {"epsilon_lo": 0.1})


def test_counts_are_reported_as_given():
    assert "divisor" in translation("fast_llm", {}).given
