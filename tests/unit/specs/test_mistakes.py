"""Every mistake in settings has its place and the nearest name, also if a class is called directly."""

import copy
import pickle

import pytest

from workbench.errors import SpecError
from workbench.specs.groups import LayoutSpec
from workbench.specs.losses import LossSpec
from workbench.specs.mistakes import ELSEWHERE, nearest_settings, setting_names
from workbench.specs.reading import parse_spec
from workbench.specs.run import RunSpec


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"loss": {"clip_high": 0.3}}, "unknown key 'loss.clip_high' (did you mean 'loss.surrogate.clip_high'?)"),
        ({"clip_high": 0.3}, "unknown key 'clip_high' (did you mean 'loss.surrogate.clip_high'?)"),
        ({"data": {"name": "grpo"}}, "unknown key 'data.name' (did you mean 'data.advantages.name'?)"),
        ({"cp": 2}, "unknown key 'cp' (did you mean 'layout.cp'?)"),
        ({"lr": 0.1}, "unknown key 'lr' (did you mean 'optimizer.learning_rate'?)"),
        ({"learning_rat": 0.1}, "unknown key 'learning_rat' (did you mean 'optimizer.learning_rate'?)"),
        ({"layout": {"lr": 1}}, "unknown key 'layout.lr' (did you mean 'optimizer.learning_rate'?)"),
        ({"layout": {"ordr": "zigzag"}}, "unknown key 'layout.ordr' (did you mean 'order'?)"),
        ({"temperature": 1}, "did you mean 'online.temperature' or 'policy.temperature'?"),
    ],
)
def test_a_name_is_searched_where_it_is_and_then_everywhere(settings, hint):
    with pytest.raises(SpecError) as caught:
        parse_spec(RunSpec, settings, where="here")
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"precision": "bf16"}, "'bf16_pure'; did you mean 'bf16_mixed' or 'bf16_pure'?"),
        ({"precision": "float46"}, "; did you mean 'float64'?"),
        ({"layout": {"order": "zigzg"}}, "; did you mean 'zigzag'?"),
        ({"precision": "Q"}, "or 'bf16_pure'\n"),
    ],
)
def test_a_value_that_is_no_choice_names_the_nearest(settings, hint):
    with pytest.raises(SpecError) as caught:
        parse_spec(RunSpec, settings, where="here")
    assert hint in str(caught.value)


def test_a_value_in_the_place_of_a_group_names_the_settings_of_the_group():
    with pytest.raises(SpecError, match=r"loss.kl = 0.05: .*; its settings are (\w+, )*coefficient"):
        parse_spec(RunSpec, {"loss": {"kl": 0.05}}, where="here")


def test_a_nearest_setting_exists():
    names = list(setting_names(RunSpec))
    assert len(names) == len(set(names))
    assert {"loss.surrogate.clip_high", "layout", "layout.cp", "loss.kl.coefficient"} <= set(names)
    assert nearest_settings("xyzzy", RunSpec) == ()


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (
            lambda: RunSpec(layout={"ordr": 1}),
            "RunSpec: 1 setting(s) cannot be used\n  found: unknown key 'layout.ordr'",
        ),
        (lambda: LayoutSpec(ordr=1), "unknown key 'ordr' (did you mean 'order'?)"),
        (lambda: LossSpec(name="grop"), "no preset 'grop' (did you mean 'grpo'?)"),
        (lambda: LayoutSpec(cp=0), "cp = 0: Input should be greater than or equal to 1"),
    ],
)
def test_a_constructor_raises_our_error(call, hint):
    with pytest.raises(SpecError) as caught:
        call()
    assert hint in str(caught.value)
    assert "pydantic" not in str(caught.value)


def test_all_mistakes_of_nested_groups_are_one_error():
    with pytest.raises(SpecError, match=r"2 setting\(s\)(?s:.*)layout.cp = 0(?s:.*)optimizer.learning_rate = -1"):
        RunSpec(layout={"cp": 0}, optimizer={"learning_rate": -1})


def test_copies_and_pickles_do_not_go_through_the_constructor(monkeypatch):
    spec = RunSpec(layout={"cp": 2}, loss={"name": "dapo"})
    called = []
    monkeypatch.setattr(type(RunSpec), "__call__", lambda cls, *args, **settings: called.append(cls))
    assert pickle.loads(pickle.dumps(spec)) == copy.deepcopy(spec) == spec.model_copy() == spec
    assert called == []


def test_many_mistakes_are_counted():
    with pytest.raises(SpecError) as caught:
        parse_spec(RunSpec, {f"unknown_{number}": "x" * 9000 for number in range(40)}, where="here")
    assert "and 28 more" in str(caught.value)


def test_a_long_value_is_shortened():
    with pytest.raises(SpecError) as caught:
        parse_spec(RunSpec, {"steps": "x" * 9000}, where="here")
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"loss": {"beta": 0.04}}, "'loss.kl.coefficient' or 'loss.surrogate.beta'"),
        ({"loss": {"epsilon": 0.2}}, "'loss.surrogate.clip_low' or 'loss.surrogate.clip_high'"),
        ({"grad_clip": 1.0}, "'optimizer.max_grad_norm'"),
        ({"data": {"advantages": "dr_grpo"}}, "so write {name: dr_grpo}"),
        ({"loss": {"correction": {"kind": "icepop", "ratio_low": 5.0, "ratio_high": 0.5}}}, "ratio_low = 5.0 is above"),
    ],
    ids=str,
)
def test_names_of_other_trainers_and_values_in_the_wrong_place(settings, named):
    with pytest.raises(SpecError) as caught:
        RunSpec(**settings)
    assert named in caught.value.parts["found"]


def test_every_name_of_another_trainer_is_a_setting_here():
    known = set(setting_names(RunSpec))
    assert [each for settings in ELSEWHERE.values() for each in settings if each not in known] == []
