"""What every surrogate's settings answer, whatever their kind."""

from workbench.specs.losses import parse_surrogate
from workbench.specs.losses.base import above


def test_a_parameter_of_another_kind_is_none():
    surrogate = parse_surrogate(kind="ppo", clip_low=0.1)
    assert (surrogate.get("clip_low"), surrogate.get("tau_positive"), surrogate.get("kind")) == (0.1, None, None)


def test_level_and_anchor_of_the_ratio():
    kinds = ("ppo", "gspo", "luspo", "dppo_tv", "sft")
    levels = [(s.ratio_level, s.ratio_anchor) for s in (parse_surrogate(kind=kind) for kind in kinds)]
    assert levels == [
        ("token", "old"),
        ("document", "old"),
        ("document", "old"),
        ("token", "sampler"),
        ("token", "old"),
    ]


def test_an_absent_bound_is_in_order():
    assert above(2.0, 1.0)
    assert not above(None, 1.0)
    assert not above(1.0, None)
