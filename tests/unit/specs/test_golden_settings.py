"""Resolved settings are those of before their redesign: of presets, shipped ablations and the systems' recorded cases.

golden_settings.json was written by the code of 2026-11-22, with one flat group of surrogate parameters and without
`compat`; it has the differences from the defaults. Numbers decided by settings cannot have changed unseen.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.unit.systems.test_cases import ALL, CASES, index
from workbench.launch.ablation import load_ablation
from workbench.specs.lora import LoraSpec
from workbench.specs.losses import PARAMETERS, PRESETS, SURROGATES, LossSpec
from workbench.specs.mixtures import PredictionSpec, RoutingSpec
from workbench.specs.precision import MixedPrecisionSpec
from workbench.specs.reading import flatten
from workbench.specs.run import ADDED_PARAMETERS, RunSpec
from workbench.specs.sync import SyncSpec
from workbench.systems import replay
from workbench.systems.registry import load_system

PROJECT = Path(__file__).parents[3]
GOLDEN = json.loads(Path(__file__).with_name("golden_settings.json").read_text())
MOVED = {
    "documents_counted": "compat.documents_counted",
    "entropy_denominator": "compat.entropy_denominator",
    "gradient_divisor": "compat.gradient_divisor",
    "kl_denominator": "compat.kl_denominator",
    "normalize_by_documents": "compat.normalize_by_documents",
    "scaling.count_epsilon": "compat.scaling.count_epsilon",
    "scaling.counts": "compat.scaling.counts",
    "scaling.divided_by": "compat.scaling.divided_by",
    "scaling.engine_divides": "compat.scaling.engine_divides",
    "scaling.engine_multiplies": "compat.scaling.engine_multiplies",
    "scaling.least_tokens": "compat.scaling.least_tokens",
    "scaling.length_epsilon": "compat.scaling.length_epsilon",
    "scaling.mean_epsilon": "compat.scaling.mean_epsilon",
    "scaling.multiplied_by": "compat.scaling.multiplied_by",
    "scaling.replicated": "compat.scaling.replicated",
}
"""Old key of a loss -> its new one. Beside these, a surrogate has no longer the parameters of other kinds."""


def renamed(settings, prefix=""):
    """Old settings under the new keys, without the parameters (None) that the surrogate's kind does not have."""
    kind = settings[f"{prefix}surrogate.kind"]
    found = {}
    for key, value in settings.items():
        name = key.removeprefix(prefix)
        group, _, parameter = name.partition(".")
        if group == "surrogate" and parameter not in SURROGATES[kind].model_fields:
            assert value is None, f"{key} = {value!r} has no place in {kind}"
        elif group == "surrogate" and parameter in ADDED_PARAMETERS.get(kind, {}):
            assert value is None, f"{key} = {value!r} was not a parameter of {kind}"
            found[key] = ADDED_PARAMETERS[kind][parameter]
        elif key.startswith(prefix):
            found[prefix + MOVED.get(name, name)] = value
        else:
            found[key] = value
    return found


def flat(spec):
    return flatten(spec.model_dump(mode="json"))


def unequal(spec, settings, prefix=""):
    """Settings on which a spec differs from old ones, or that only one of both has."""
    new, old = flat(spec), renamed(settings, prefix)
    return {
        key: (new.get(key, "absent"), old.get(key, "absent"))
        for key in new.keys() | old.keys()
        if key not in new or key not in old or json.dumps(new[key]) != json.dumps(old[key])
    }


NEWER = (
    {"layout.ep": 1, "layout.pp": 1, "layout.pipeline_schedule": "1f1b", "layout.stages_per_rank": 1}
    | {
        "layout.stage_layers": [],
        "layout.shard_ranks": 0,
        "layout.reshard_after_forward": True,
        "layout.unit_layers": 1,
        "data.balance": "tokens",
    }
    | {"kernels.mlp": "torch", "kernels.norm": "torch", "kernels.rope": "torch"}
    | {f"routing.{name}": field.default for name, field in RoutingSpec.model_fields.items()}
    | {f"prediction.{name}": field.default for name, field in PredictionSpec.model_fields.items()}
    | {"online.top_k": None, "online.top_p": 1.0, "online.min_p": 0.0, "online.sampler_logprobs": None}
    | {"online.truncation_order": "transformers", "policy.support": "whole"}
    | {f"sync.{name}": list(v) if isinstance(v := f.default, tuple) else v for name, f in SyncSpec.model_fields.items()}
    | {f"lora.{name}": list(v) if isinstance(v := f.default, tuple) else v for name, f in LoraSpec.model_fields.items()}
    | {f"mixed_precision.{name}": None for name in MixedPrecisionSpec.model_fields}
)
"""Settings that the record is older than -> the value which means what the code did then."""
# which the record is older than
LOSS = GOLDEN["loss defaults"] | {"kl_denominator": "penalty", "correction.staleness_high": None}
RUN = GOLDEN["run defaults"] | NEWER | {f"loss.{key}": value for key, value in LOSS.items()}


def test_every_entry_of_the_map_is_used():
    assert MOVED.keys() <= LOSS.keys()
    assert set(MOVED.values()) == {key for key in flat(LossSpec()) if key.startswith("compat.")}
    old = {key.removeprefix("surrogate.") for key in LOSS if key.startswith("surrogate.")}
    of_files = {"function", "settings", "engine"}  # a loss in a file, which the record is older than
    assert old == {*PARAMETERS, "kind", "coefficient"} - of_files


def test_a_changed_value_a_lost_key_and_a_new_key_are_seen():
    assert unequal(LossSpec(compat={"gradient_divisor": 2.0}), LOSS) == {"compat.gradient_divisor": (2.0, 1.0)}
    assert unequal(LossSpec(), LOSS | {"own": 1}) == {"own": ("absent", 1)}
    less = {key: value for key, value in LOSS.items() if key != "truncated"}
    assert unequal(LossSpec(), less) == {"truncated": ("train", "absent")}
    with pytest.raises(AssertionError, match="has no place in ppo"):
        unequal(LossSpec(), LOSS | {"surrogate.beta": 0.1})


def test_defaults():
    assert unequal(LossSpec(), LOSS) == {}
    assert unequal(RunSpec(), RUN, "loss.") == {}


@pytest.mark.parametrize("name", GOLDEN["presets"])
def test_preset(name):
    assert unequal(LossSpec(name=name), LOSS | GOLDEN["presets"][name]) == {}


def test_no_preset_is_without_its_golden_settings():
    assert GOLDEN["presets"].keys() == PRESETS.keys()


@pytest.mark.parametrize("path", GOLDEN["ablations"])
def test_shipped_ablation(path):
    planned = {plan.name: plan.spec for plan in load_ablation(PROJECT / path).expand()}
    expected = GOLDEN["ablations"][path]
    assert planned.keys() == expected.keys()
    found = {name: unequal(spec, RUN | expected[name], "loss.") for name, spec in planned.items()}
    assert {name: differences for name, differences in found.items() if differences} == {}


@pytest.fixture
def specs_made(monkeypatch):
    """The specs of losses made so far, in their order."""
    made, create = [], LossSpec.__init__

    def remember(self, *args, **settings):
        create(self, *args, **settings)
        made.append(self)

    monkeypatch.setattr(LossSpec, "__init__", remember)
    return made


def test_every_case_has_its_golden_settings():
    assert GOLDEN["cases"].keys() == {f"{system}/{name}" for system, name in ALL}


@pytest.mark.parametrize("system", dict.fromkeys(system for system, _ in ALL))
def test_recorded_cases(system, specs_made):
    load_system(system)
    different = {}
    for name, case in index(system).items():
        with np.load(CASES / system / case["file"]) as arrays:
            inputs = {key[3:]: arrays[key] for key in arrays if key.startswith("in.")}
        specs_made.clear()
        replay(system, case["kind"], case["function"], case["config"], inputs)
        # A preset as it is gives the weights of a step here and there, and how often is no setting.
        texts = dict.fromkeys(spec.model_dump_json() for spec in specs_made)
        specs = [LossSpec.model_validate_json(text) for text in texts]
        made = [spec for spec in specs if spec != LossSpec(name=spec.name)] or specs[:1]
        golden = GOLDEN["cases"][f"{system}/{name}"]
        expected = [old for old in golden if old != GOLDEN["presets"][old.get("name", "grpo")]] or golden[:1]
        found = [unequal(spec, LOSS | old) for spec, old in zip(made, expected, strict=False)]
        if len(made) != len(expected) or any(found):
            different[name] = (len(made), len(expected), found)
    assert different == {}
