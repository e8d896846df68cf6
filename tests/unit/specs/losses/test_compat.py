"""Settings that only losses of other systems need: their effect on invariants, and their place in records."""

import pytest

from workbench.errors import SpecError
from workbench.specs.losses import CompatSpec, LossSpec, with_compat
from workbench.specs.reading import parse_spec
from workbench.specs.run import RunSpec


def test_counting_all_documents_breaks_an_invariant_only_for_document_counts():
    assert LossSpec(denominator="document", compat={"documents_counted": "all"}).breaks == ("masked_rows",)
    assert LossSpec(denominator="token", compat={"documents_counted": "all"}).breaks == ()
    twice = LossSpec(denominator="token", compat={"documents_counted": "all", "normalize_by_documents": True})
    assert twice.breaks == ("masked_rows",)


def test_the_defaults_do_nothing():
    assert LossSpec(compat=CompatSpec()) == LossSpec()
    assert "compat" not in LossSpec(name="dapo", compat={"gradient_divisor": 1.0}).overrides()


def test_a_nested_change_is_merged_key_by_key():
    before = RunSpec(loss={"compat": {"documents_counted": "all", "scaling": {"counts": "pass"}}})
    compat = before.merged({"loss": {"compat": {"scaling": {"count_epsilon": 0.5}}}}).loss.compat
    assert (compat.documents_counted, compat.scaling.counts, compat.scaling.count_epsilon) == ("all", "pass", 0.5)
    assert LossSpec(**before.loss.overrides()) == before.loss


@pytest.mark.parametrize("name", CompatSpec.model_fields)
def test_a_setting_at_its_old_place_is_refused_with_the_new_one(name):
    with pytest.raises(SpecError, match=rf"unknown key 'loss.{name}' \(did you mean 'loss.compat.{name}'\?\)"):
        parse_spec(RunSpec, {"loss": {name: CompatSpec().model_dump()[name]}}, where="config.json")


def test_recorded_settings_of_before_are_read_as_they_were_meant():
    spec = LossSpec(denominator="document", compat={"documents_counted": "all", "scaling": {"counts": "micro_batch"}})
    today = spec.model_dump(mode="json")
    older = {name: value for name, value in today.items() if name != "compat"} | today["compat"]
    assert LossSpec.model_validate(with_compat(older)) == spec
    assert with_compat(today) == today
