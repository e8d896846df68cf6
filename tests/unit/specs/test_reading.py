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
        with pytest.raises(SpecError, match="known here: attention, block_tokens, checkpointing, cp, dp, ep, kernel, "):
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

    @pytest.mark.parametrize(
        ("settings", "text"),
        [
            ({"layout": {"pp": 2, "pipeline_schedule": "zero_bubble"}}, "'zero_bubble' is not supported: it splits"),
            ({"layout": {"pp": 2, "stages_per_rank": 2}}, "are those of interleaved_1f1b"),
            ({"layout": {"pipeline_schedule": "interleaved_1f1b", "stages_per_rank": 2}}, "with pp = 1"),
            ({"layout": {"pp": 2, "pipeline_schedule": "interleaved_1f1b"}}, "with stages_per_rank = 1 is 1f1b"),
            ({"layout": {"pp": 2}, "record": {"trace_tokens": 8}}, r"layout\.pp with record\.trace_tokens"),
            ({"layout": {"pp": 2}, "reproducible": {"block_tokens": 8}}, r"layout\.pp with the reproducible mode"),
            (
                {
                    "layout": {"pp": 2},
                    "online": {"task": "arithmetic"},
                    "data": {"advantages": {"name": "grpo"}},
                },
                r"layout\.pp with online\.task",
            ),
        ],
        ids=lambda value: "" if isinstance(value, str) else None,
    )
    def test_pipelines_that_are_not_supported_are_refused_by_name(self, settings, text):
        with pytest.raises(SpecError, match=text):
            parse_spec(RunSpec, settings, where="here")

    @pytest.mark.parametrize(
        ("settings", "text"),
        [
            ({"routing": {"capacity_factor": 1.25}}, "capacity_factor is not supported: with a capacity"),
            ({"routing": {"z": 0.1}, "reproducible": {"block_tokens": 8}}, r"routing\.z with the reproducible mode"),
            ({"routing": {"replay": "old"}}, r"routing\.replay 'old' without a pass"),
        ],
        ids=lambda value: "" if isinstance(value, str) else None,
    )
    def test_routing_that_is_not_supported_is_refused_by_name(self, settings, text):
        with pytest.raises(SpecError, match=text):
            parse_spec(RunSpec, settings, where="here")

    @pytest.mark.parametrize(
        ("settings", "text"),
        [
            ({"prediction": {"coefficient": 0.2}}, r"prediction\.coefficient is of layers that there are not"),
            (
                {"prediction": {"depths": 1}, "reproducible": {"block_tokens": 8}},
                r"prediction\.depths with the reproducible mode",
            ),
            (
                {"prediction": {"depths": 1, "detach": "policy"}, "lora": {"r": 2}},
                r"prediction\.detach 'policy' with lora",
            ),
            ({"prediction": {"depths": 1}, "record": {"trace_tokens": 1}}, r"prediction\.depths with record\.trace"),
            (
                {
                    "loss": {"name": "sft", "surrogate": {"label_smoothing": 0.1}},
                    "reproducible": {"block_tokens": 8},
                },
                r"label_smoothing: this mode has no mean of the logits",
            ),
            (
                {"loss": {"name": "sft", "surrogate": {"label_smoothing": 0.1}}, "policy": {"support": "recorded"}},
                r"label_smoothing with policy\.support 'recorded'",
            ),
            ({"loss": {"surrogate": {"label_smoothing": 0.1}}}, "label_smoothing is not used by the surrogate 'ppo'"),
        ],
        ids=lambda value: "" if isinstance(value, str) else None,
    )
    def test_prediction_and_smoothing_that_are_not_supported_are_refused_by_name(self, settings, text):
        with pytest.raises(SpecError, match=text):
            parse_spec(RunSpec, settings, where="here")

    def test_settings_that_were_added_later_do_not_rename_a_run_at_their_defaults(self):
        """The identity of a run of `sft` is that of a run from before its label smoothing; with smoothing it is not."""
        spec = parse_spec(RunSpec, {"loss": {"name": "sft"}}, where="here")
        assert "label_smoothing" not in spec.canonical()
        assert "prediction" not in spec.canonical()
        smoothed = spec.merged({"loss": {"surrogate": {"label_smoothing": 0.1}}})
        assert smoothed.content_hash() != spec.content_hash()
        assert spec.merged({"prediction": {"depths": 1}}).content_hash() != spec.content_hash()

    def test_pipeline_ranks_are_counted_and_shown(self):
        settings = {"dp": 2, "pp": 2, "pipeline_schedule": "interleaved_1f1b", "stages_per_rank": 2}
        layout = parse_spec(RunSpec, {"layout": settings}, where="here").layout
        assert (layout.world_size, layout.mesh_sizes["pp"]) == (4, 2)
        assert str(layout) == "pp=2 dp=2 interleaved_1f1b stages=2"

    def test_experts_are_shared_by_ranks_of_dp_and_cp(self):
        with pytest.raises(SpecError, match=r"ep = 2 does not divide dp \* cp = 3"):
            parse_spec(RunSpec, {"layout": {"dp": 3, "tp": 2, "ep": 2}}, where="here")
        assert str(parse_spec(RunSpec, {"layout": {"dp": 2, "cp": 2, "ep": 4}}, where="here").layout).endswith("ep=4")

    def test_no_such_file(self, tmp_path):
        with pytest.raises(SpecError, match="no such file"):
            load_run_spec(tmp_path / "none.yaml")

    def test_not_yaml(self, tmp_path):
        path = tmp_path / "bad.yaml"
        path.write_text("a: [1,\nb: 2")
        with pytest.raises(SpecError, match="valid YAML"):
            load_run_spec(path)
