"""Liger against its formulas: the fused losses on policies and on pairs, for every option."""

import pytest
import torch

from tests.oracles.systems import liger as oracle
from workbench.errors import SpecError
from workbench.specs.losses import LossSpec
from workbench.systems.replays import replay
from workbench.systems.translate import loss_spec, settings_for, translation

KINDS = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo", "cispo", "vespo")
OF_ROWS = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
PLAIN = {
    "beta": 0.0,
    "epsilon_low": 0.2,
    "epsilon_high": 0.28,
    "temperature": 1.0,
    "delta": None,
    "use_bias_correction_kl": False,
    "vllm_is": None,
    "num_items_in_batch": None,
    "chunk_size": 2,
    "max_completion_length": 9,
    "sapo_temperature_pos": 0.8,
    "sapo_temperature_neg": 1.05,
    "vespo": {"k_pos": 1.5, "lambda_pos": 2.0, "k_neg": 3.0, "lambda_neg": 0.0},
}
VARIANTS = {
    "plain": {},
    "kl": {"beta": 0.1, "ref": "logprobs"},
    "kl_corrected": {"beta": 0.1, "ref": "logprobs", "use_bias_correction_kl": True, "bias": True},
    "kl_of_hidden": {"beta": 0.1, "ref": "hidden", "temperature": 0.7},
    "kl_of_hidden_with_bias": {"beta": 0.1, "ref": "hidden_bias", "bias": True},
    "kl_without_reference": {"beta": 0.1, "use_bias_correction_kl": True},
    "weights_of_tokens": {"vllm_is": "token", "num_items_in_batch": 97, "temperature": 1.3},
    "weights_of_rows": {"vllm_is": "seq", "num_items_in_batch": 0},
    "delta": {"delta": 1.4, "epsilon_high": 0.1},
    "delta_within_the_clip": {"delta": 1.1},
    "on_policy": {"old": False},
    "empty_row": {"empty": True, "num_items_in_batch": 13},
}
PAIRS = (
    "sigmoid",
    "hinge",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
)
PAIR_PLAIN = {
    "beta": 0.1,
    "compute_nll_loss": False,
    "ignore_index": -100,
    "label_smoothing": 0.1,
    "alpha": 1.0,
    "average_log_prob": False,
    "use_ref_model": True,
    "discopop_tau": 0.05,
}
OURS = ("ref", "bias", "old", "empty")


def normals(seed):
    g = torch.Generator().manual_seed(seed)
    return g, lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)


def batch(seed, options, *, rows=4, length=5, width=3, vocabulary=7):
    g, normal = normals(seed)
    mask = torch.zeros(rows, length, dtype=torch.float64)
    for row, trained in enumerate((length, 1, 0 if options.get("empty") else 3, 4)):
        mask[row, :trained] = 1
    arrays = {
        "hidden": normal(rows, length, width),
        "weight": normal(vocabulary, width),
        "mask": mask,
        "targets": torch.randint(0, vocabulary, (rows, length), generator=g),
        "advantages": normal(rows),
    }
    if options.get("bias"):
        arrays["bias"] = normal(vocabulary)
    logprobs, spread = oracle.logprobs_of(arrays, options["temperature"]), (0.08, 0.3, 1.0)[seed % 3]
    if options.get("old", True):
        arrays["old_logprobs"] = logprobs + spread * normal(rows, length)
    ref = options.get("ref", "")
    if ref == "logprobs":
        arrays["ref_logprobs"] = logprobs + 0.3 * normal(rows, length)
    if ref.startswith("hidden"):
        arrays |= {"ref_hidden": normal(rows, length, width), "ref_weight": normal(vocabulary, width)}
    if ref == "hidden_bias":
        arrays["ref_bias"] = normal(vocabulary)
    if options["vllm_is"]:
        arrays["is_weights"] = normal(rows, length if options["vllm_is"] == "token" else 1).exp()
    return arrays


def options_of(kind, level, variant):
    changed = {**PLAIN, **VARIANTS[variant], "loss_type": kind, "importance_sampling_level": level}
    return changed | ({"epsilon_high": 1.4} if kind == "cispo" else {})


def said(options):
    return {name: value for name, value in options.items() if name not in OURS}


def assert_close(found, expected, context):
    torch.testing.assert_close(
        torch.as_tensor(found, dtype=torch.float64),
        torch.as_tensor(expected, dtype=torch.float64),
        rtol=1e-10,
        atol=1e-12,
        msg=lambda message: f"{context}: {message}",
    )


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kind", "level"), [(k, "token") for k in KINDS] + [(k, "sequence") for k in OF_ROWS])
def test_every_option_of_the_loss_on_policies(kind, level, seed):
    for number, variant in enumerate(VARIANTS):
        options = options_of(kind, level, variant)
        arrays = batch(seed + number, options)
        expected = oracle.policy_loss(options, arrays)
        result = replay("liger", "fused_linear_policy_loss", "", said(options), arrays)
        for name in set(expected) - {"metrics"}:
            assert_close(result[name], expected[name], f"{variant}: {name}")
        for name, value in expected["metrics"].items():
            assert_close(result["metrics"][name], value, f"{variant}: {name}")


@pytest.mark.parametrize("kind", PAIRS)
def test_every_loss_on_pairs(kind):
    variants = (
        {},
        {"compute_nll_loss": True, "alpha": 0.5},
        {"average_log_prob": True, "bias": True},
        {"use_ref_model": False},
        {"head": True, "bias": True, "beta": 0.4, "ignore_index": -1},
    )
    for seed, changed in enumerate(variants):
        options = {**PAIR_PLAIN, **changed, "loss_type": kind}
        g, normal = normals(seed)
        targets = torch.randint(0, 7, (6, 5), generator=g)
        for row, length in enumerate((5, 1, 3, 4, 2, 5)):
            targets[row, length:] = options["ignore_index"]
        arrays = {"hidden": normal(6, 5, 3), "weight": normal(7, 3), "targets": targets}
        if options["use_ref_model"]:
            arrays["ref_hidden"] = normal(6, 5, 3)
        if changed.get("head"):
            arrays |= {"ref_weight": normal(7, 3), "ref_bias": normal(7)}
        if changed.get("bias"):
            arrays["bias"] = normal(7)
        asked = {name: value for name, value in options.items() if name not in ("bias", "head")}
        result = replay("liger", "fused_linear_dpo", "", asked, arrays)
        for name, value in oracle.dpo(options, arrays).items():
            assert_close(result[name], value, f"{changed}: {name}")


def test_luspo_does_not_read_padding():
    options = options_of("luspo", "token", "kl")
    arrays = batch(0, options)
    moved = {**arrays, "old_logprobs": torch.where(arrays["mask"] == 0, 3.0, arrays["old_logprobs"])}
    expected, result = (
        replay("liger", "fused_linear_policy_loss", "", said(options), each) for each in (arrays, moved)
    )
    assert not torch.equal(arrays["old_logprobs"], moved["old_logprobs"])
    for name in ("loss", "grad_hidden", "grad_weight"):
        assert torch.equal(result[name], expected[name])
    assert any("padding leaks" in note for note in translation("liger", {"loss_type": "luspo"}).notes)


# ---- translation ---------------------------------------------------------------------------------------------


def test_defaults_are_those_of_the_kernel():
    spec = loss_spec("liger", {})
    assert (spec.denominator, spec.kl.coefficient, spec.kl.importance) == ("token", 0.04, "none")
    assert (spec.surrogate.clip_low, spec.surrogate.clip_high, spec.compat.scaling.counts) == (0.2, 0.2, "micro_batch")
    assert loss_spec("liger", {"num_items_in_batch": 100}).compat.scaling.counts == "step"


@pytest.mark.parametrize("kind", KINDS)
def test_the_way_back_leads_to_the_same_loss(kind):
    levels = ("token", "sequence") if kind in OF_ROWS else ("token",)
    for options in (options_of(kind, level, variant) for level in levels for variant in VARIANTS):
        spec = loss_spec("liger", said(options))
        assert loss_spec("liger", settings_for("liger", spec)) == spec


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"name": "gmpo"}, "the surrogate 'gmpo'"),
        ({"entropy_coefficient": 0.1}, "entropy_coefficient = 0.1"),
        ({"correction": {"kind": "tis"}}, "a correction that it makes itself"),
    ],
)
def test_unsupported_settings_are_refused(spec, words):
    with pytest.raises(SpecError, match=words):
        settings_for("liger", LossSpec(**spec))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss_typ": "grpo"}, "unknown option 'loss_typ'"),
        ({"loss_type": "sapo", "importance_sampling_level": "sequence"}, "sapo has no ratio of rows"),
        ({"loss_type": "dr_grpo"}, "dr_grpo divides by max_completion_length"),
    ],
)
def test_options_that_cannot_be_translated_are_refused(options, words):
    with pytest.raises(SpecError, match=words):
        loss_spec("liger", options)


@pytest.mark.parametrize(
    ("options", "note"),
    [
        ({"use_ref_model": False}, "the policy against itself"),
        ({"loss_type": "cispo"}, "cispo bounds the ratio by epsilon_high itself, 0.2"),
        ({"loss_type": "vespo"}, "have no effect on vespo"),
        ({"loss_type": "grpo", "num_items_in_batch": 5}, "num_items_in_batch has no effect on grpo"),
        ({"loss_type": "dapo"}, "the tokens of this call are counted"),
    ],
)
def test_implicit_behaviour_is_noted(options, note):
    assert any(note in each for each in translation("liger", options).notes)
