"""One module of two: a factor on all of it, another gradient in all of it, and what is neither."""

import pytest
import torch

from workbench.diagnose import Record, diagnose
from workbench.diagnose.record import RecordedStep

NAMES = [
    f"{module}.layers.{layer}.{part}.weight"
    for module in ("encoder", "model")
    for layer in range(2)
    for part in ("self_attn.q_proj", "mlp.fc1")
]
OWN = {"modules": {"encoder": {"dp": 3, "cp": 1, "tp": 1}}, "dp": 1, "cp": 2, "tp": 1, "precision": "float64"}


def gradients(change=lambda name, gradient: gradient):
    draw = torch.Generator().manual_seed(0)
    found = {name: torch.randn(8, 4, generator=draw, dtype=torch.float64) for name in [*NAMES, "encoder.last.bias"]}
    return {name: change(name, gradient) for name, gradient in found.items()}


def told(change, context=OWN, loss=0.5):
    def record(given, loss):
        norms = {name: float(gradient.norm()) for name, gradient in given.items()}
        return Record(context, (RecordedStep(0, loss, {}, norms, {}, given, {}),), "")

    return diagnose(record(gradients(), 0.5), record(gradients(change), loss))


def inside(factor):
    return lambda name, gradient: gradient * factor if name.startswith("encoder.") else gradient


@pytest.mark.parametrize(("factor", "words"), [(1 / 3, "1 / dp of encoder"), (2.0, "cp"), (5.5, "no size on record")])
def test_a_factor_on_one_module_is_named(factor, words):
    first = told(inside(factor)).causes[0]
    assert first.name == "module_scaled"
    assert words in first.evidence[0]


def test_another_gradient_in_one_module_is_what_reached_it():
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
    found = {cause.name: cause.score for cause in diagnose(record(said_S), record(other_S)).causes}
    assert found.get("other_features") == (None if score is None else pytest.approx(score))
