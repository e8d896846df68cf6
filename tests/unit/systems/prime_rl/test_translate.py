"""prime-rl against its formulas, document by document: both losses, and every mixture of components."""

import itertools

import pytest
import torch

from tests.oracles.systems import prime_rl as oracle
from workbench.errors import SpecError
from workbench.specs.losses import LossSpec
from workbench.systems.replays import replay
from workbench.systems.translate import loss_spec, settings_for, translation

OPTIONS = [
    {"type": "default", "dppo_mask_low": 0.2, "dppo_mask_high": 0.2, "adv_tau": 1.0, "kl_tau": 1e-3},
    {"type": "default", "dppo_mask_low": 0.05, "dppo_mask_high": 0.3, "adv_tau": 0.7, "kl_tau": 0.05},
    {"type": "default", "dppo_mask_low": 0.0, "dppo_mask_high": 0.0, "adv_tau": 1.0, "kl_tau": 0.0},
    {"type": "ipo", "ipo_threshold": 0.1, "adv_tau": 1.0, "kl_tau": 1e-3},
    {"type": "ipo", "ipo_threshold": 0.3, "adv_tau": 0.0, "kl_tau": 0.2},
]
STREAMS = [streams for count in range(4) for streams in itertools.combinations(("rl", "ce", "ref_kl"), count)]
SCALES = {"rl_scale": 37, "ce_scale": 11, "ref_kl_scale": 13}


def batch(seed, streams=()):
    """Packed documents of 1 to 9 tokens, one untrained, without garbage: ce and ref_kl read every position."""
    g = torch.Generator().manual_seed(seed)
    sizes = [5, 1, 2, 9, 3]
    index = torch.tensor([d for d, size in enumerate(sizes) for _ in range(size)])
    size = len(index)

    def normal():
        return torch.randn(size, generator=g, dtype=torch.float64)

    spread = (0.1, 0.6, 1.5)[seed % 3]
    logprobs = -2 * torch.rand(size, generator=g, dtype=torch.float64) - 0.01
    advantages = normal() if seed % 2 else normal()[index]
    advantages[index == 2] = 0
    mask = (torch.rand(size, generator=g) < 0.7).double() * (index != 4)
    arrays = {
        "logprobs": logprobs,
        "rollout_logprobs": (logprobs + spread * normal()).clamp(max=-1e-3),
        "ref_logprobs": (logprobs + spread * normal()).clamp(max=-1e-3),
        "advantages": advantages,
        "mask": mask,
        "document_index": index,
    }
    for name in streams:
        arrays[f"{name}_weights"] = torch.randint(0, 4, (size,), generator=g) / 2
        arrays[f"{name}_weights"][index == 1] = 0
    return arrays


def close(found, expected):
    assert found.keys() - {"metrics"} == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name],
            torch.as_tensor(value, dtype=torch.float64),
            rtol=1e-10,
            atol=1e-12,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
@pytest.mark.parametrize("streams", STREAMS, ids="+".join)
def test_the_loss_and_the_numbers_of_documents_are_their_formulas(options, streams):
    for seed in range(3):
        arrays, config = batch(seed, streams), options | SCALES
        close(
            replay("prime_rl", "policy_loss_packed", "compute_loss", config, arrays),
            oracle.compute_loss(config, arrays),
        )


def test_the_batches_have_dropped_and_surviving_tokens():
    dropped = {"doc_is_masked_low": 0.0, "doc_is_masked_high": 0.0, "doc_ref_kl.is_masked": 0.0}
    for seed in range(3):
        result = oracle.compute_loss(OPTIONS[1] | SCALES, batch(seed, ("ref_kl",)))
        dropped = {name: max(value, *result[name]) for name, value in dropped.items()}
        assert min(result["doc_is_masked"]) == 0
    assert min(dropped.values()) > 0


def test_masked_values_do_not_matter_to_the_rl_component():
    arrays, config = batch(1), OPTIONS[0] | SCALES
    clean = replay("prime_rl", "policy_loss_packed", "", config, arrays)
    for name in ("logprobs", "rollout_logprobs", "ref_logprobs", "advantages"):
        arrays[name] = torch.where(arrays["mask"] > 0, arrays[name], torch.nan)
    result = replay("prime_rl", "policy_loss_packed", "", config, arrays)
    close(result, {name: value for name, value in clean.items() if name != "metrics"})


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_settings_round_trip(options):
    spec = loss_spec("prime_rl", options)
    assert settings_for("prime_rl", spec).items() >= {k: v for k, v in options.items() if k != "type"}.items()
    assert loss_spec("prime_rl", settings_for("prime_rl", spec)) == spec


@pytest.mark.parametrize("name", ["prime_rl", "ipo"])
def test_the_presets_have_options_there(name):
    assert settings_for("prime_rl", LossSpec(name=name))["kl_tau"] == 1e-3


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "grpo"},
        {"name": "dppo_kl"},
        {"name": "dppo_tv", "surrogate": {"anchor": "old"}},
        {"name": "prime_rl", "denominator": "document"},
        {"name": "prime_rl", "surrogate": {"ratio_cap": 2.0}},
    ],
)
def test_a_loss_that_it_has_not_is_refused(changes):
    with pytest.raises(SpecError, match="prime-rl"):
        settings_for("prime_rl", LossSpec(**changes))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dppo_mask": 0.1}, "unknown option 'dppo_mask'"),
        ({"type": "custom"}, "a function of the user's own"),
        ({"type": "ipo", "dppo_mask_low": 0.1}, "dppo_mask_low is an option of type 'default'"),
        ({"ipo_threshold": 0.1}, "ipo_threshold is an option of type 'ipo'"),
        ({"adv_tau": -1.0}, "adv_tau = -1.0"),
    ],
)
def test_options_that_it_refuses_are_refused_here(settings, words):
    with pytest.raises(SpecError, match=words):
        loss_spec("prime_rl", settings)


def test_implicit_behaviour_is_noted():
    assert any("an advantage of 0" in note for note in translation("prime_rl", {}).notes)
    assert translation("prime_rl", {}).given == ("rl_scale", "ce_scale", "ref_kl_scale")
