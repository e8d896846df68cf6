"""What every surrogate's settings answer, whatever their kind."""

import pytest

from workbench.errors import SpecError
from workbench.specs.losses import parse_surrogate
from workbench.specs.losses.base import above
from workbench.specs.reading import parse_spec
from workbench.specs.run import RunSpec


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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": True}, "steps = 'True': a number is needed, not a truth value"),
        ({"seed": 10**400}, "64 bits"),
        ({"timeout_s": float("nan")}, "NaN is no setting"),
        ({"timeout_s": float("inf")}, "finite number|less than or equal"),
        ({"timeout_s": 1e300}, "less than or equal"),
        ({"optimizer": {"learning_rate": float("inf")}}, "finite number"),
        ({"data": {"path": "a\0b"}}, "NUL"),
        ({"data": {"path": "a" * 256}}, "a name in it 255"),
        ({"model": {"source": "a/" * 2500}}, "5,000 bytes"),
        ({"model": {"source": "\ud800"}}, "surrogate"),
        ({"loss": {"surrogate": {"kind": ["ppo"]}}}, "no surrogate"),
        ({"loss": {"surrogate": {"kind": {"a": 1}}}}, "no surrogate"),
        ({"loss": {"correction": {"kind": ["a"]}}}, "kind"),
    ],
)
def test_values_that_no_setting_can_have(settings, message):
    with pytest.raises(SpecError, match=message):
        parse_spec(RunSpec, settings, where="a file")
