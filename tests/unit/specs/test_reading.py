"""Settings are read whole or refused: every mistake is named with its place."""

import pytest

from workbench.errors import SpecError
from workbench.specs.reading import parse_spec
from workbench.specs.run import RunSpec, load_run_spec


class TestRefusals:
    def test_a_misspelt_key_names_the_nearest(self, tmp_path):
        path = tmp_path / "spec.yaml"
        path.write_text("layuot: {cp: 2}\nloss: {surrogate: {clip_hihg: 0.3}}\n")
        with pytest.raises(SpecError) as caught:
            load_run_spec(path)
        message = str(caught.value)
        assert "spec.yaml: 2 setting(s) cannot be used" in message
        assert "unknown key 'layuot' (did you mean 'layout'?)" in message
        assert "unknown key 'loss.surrogate.clip_hihg' (did you mean 'clip_high'?)" in message

    def test_an_unrecognisable_key_lists_the_valid_ones(self):
        with pytest.raises(SpecError, match="known here: attention, block_tokens, checkpointing, cp, dp, kernel, "):
            parse_spec(RunSpec, {"layout": {"xyzzy": 1}}, where="here")

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"layout": {"cp": 0}}, "layout.cp = 0: .*greater than or equal to 1"),
            ({"layout": {"order": "zagzig"}}, "layout.order = 'zagzig'"),
            ({"precision": "float16"}, "precision = 'float16'"),
            ({"steps": "many"}, "steps = 'many'"),
            ({"loss": {"surrogate": {"clip_low": -0.1}}}, "loss.surrogate.clip_low = -0.1"),
            ({"policy": {"temperature": 0}}, "policy.temperature = 0: .*greater than 0"),
        ],
    )
    def test_a_bad_value_is_named_with_its_place(self, settings, words):
        with pytest.raises(SpecError, match=words):
            parse_spec(RunSpec, settings, where="here")

    @pytest.mark.parametrize(
        ("settings", "text"),
        [
            ([1], r"found: \[1\]: Input should be a valid dictionary"),
            ({"loss": {"denominator_constant": 3.0}}, "found: loss: denominator_constant is not used"),
            ({"loss": {"surrogate": {"kind": "gspo", "clip_low": -1}}}, r"found: loss\.surrogate\.clip_low = -1: "),
        ],
    )
    def test_a_mistake_of_a_whole_group_is_named_without_its_settings(self, settings, text):
        with pytest.raises(SpecError, match=text):
            parse_spec(RunSpec, settings, where="here")

    @pytest.mark.parametrize(("axis", "word"), [("pp", "pipeline"), ("ep", "expert")])
    def test_missing_kinds_of_parallelism_are_refused_by_name(self, axis, word):
        with pytest.raises(SpecError, match=rf"{axis} \({word} parallelism\) is not supported"):
            parse_spec(RunSpec, {"layout": {axis: 2}}, where="here")

    def test_no_such_file(self, tmp_path):
        with pytest.raises(SpecError, match="no such file"):
            load_run_spec(tmp_path / "none.yaml")

    def test_not_yaml(self, tmp_path):
        path = tmp_path / "bad.yaml"
        path.write_text("a: [1,\nb: 2")
        with pytest.raises(SpecError, match="valid YAML"):
            load_run_spec(path)
