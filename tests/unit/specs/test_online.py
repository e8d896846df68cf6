"""Settings of online rollouts: what conflicts is refused, all at once, each with its fix."""

import json

import pytest

from workbench.errors import SpecError
from workbench.specs.reading import merge, parse_spec
from workbench.specs.run import RunSpec

ONLINE = {"online": {"task": "arithmetic"}, "data": {"advantages": {"name": "grpo"}}}


class TestOnline:
    def test_is_enabled_by_a_task(self):
        assert not RunSpec().online.on
        spec = parse_spec(RunSpec, ONLINE, where="here")
        assert spec.online.on
        assert spec.online.documents == 16 * 8

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            (
                {"data": {"advantages": {"name": "recorded"}}},
                "a task gives rewards and no advantages; name an estimator",
            ),
            ({"data": {"path": "elsewhere"}}, "data.path = 'elsewhere' would not be read"),
            (
                {"data": {"documents_per_step": 129}},
                r"documents_per_step = 129 is more than a sampling has \(16 prompts",
            ),
            ({"data": {"documents_per_step": 60}, "online": {"updates": 2}}, "train on 120 of the 128 completions"),
            ({"frozen_clip": "other"}, "frozen_clip takes decisions of another run"),
            (
                {"data": {"documents_per_step": 100, "keep_groups": True}, "online": {"updates": 2}},
                "splits groups of 8",
            ),
            ({"faults": ["whitening_per_rank"]}, "fault 'whitening_per_rank' does nothing"),
            (
                {"data": {"documents_per_step": 9}, "loss": {"name": "dpo"}, "online": {"answers": 2, "updates": 4}},
                "splits groups of 2 completions",
            ),
            ({"data": {"advantages": {"name": "gae"}}}, "'gae' needs critic values"),
            ({"data": {"advantages": {"name": "remax"}}}, "'remax' needs rewards of greedy completions"),
            ({"online": {"answers": 1}}, "one completion per prompt is no group"),
            (
                {"record": {"checkpoint_every": 3}, "online": {"updates": 2}},
                "checkpoint_every = 3 lies between samplings",
            ),
            ({"loss": {"name": "dpo"}}, "loss 'dpo' compares pairs, and online.answers = 8; take answers: 2"),
        ],
    )
    def test_conflicting_settings_are_refused(self, changes, words):
        with pytest.raises(SpecError, match=f"online: .*{words}"):
            parse_spec(RunSpec, merge(ONLINE, changes), where="here")

    def test_all_errors_are_reported_at_once(self):
        with pytest.raises(SpecError, match=r"advantages; name(.|\n)*; frozen_clip takes"):
            parse_spec(RunSpec, {"online": {"task": "arithmetic"}, "frozen_clip": "other"}, where="here")

    def test_compatible_settings_are_accepted(self):
        changes = {"data": {"documents_per_step": 128}, "record": {"checkpoint_every": 4}, "online": {"updates": 2}}
        assert parse_spec(RunSpec, merge(ONLINE, changes), where="here").online.updates == 2
        assert parse_spec(RunSpec, merge(ONLINE, {"loss": {"name": "dpo"}, "online": {"answers": 2}}), where="here")

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"prompts": 4}, "prompts without a task"),
            ({"answers": 2, "updates": 2}, "answers, updates without a task"),
            ({"temperature": 0.7}, "temperature without a task"),
            ({"sampler_precision": "bfloat16"}, "without a task"),
        ],
    )
    def test_settings_without_a_task_are_refused(self, settings, words):
        with pytest.raises(SpecError, match=words):
            parse_spec(RunSpec, {"online": settings}, where="here")

    def test_an_unused_setting_keeps_the_identity(self):
        """Runs are named by their settings, and were before there was any of this."""
        settings = json.loads(RunSpec().canonical())
        assert "online" not in settings
        assert "checkpoint_every" not in settings["record"]
        assert RunSpec(online={}, record={"checkpoint_every": None}).content_hash() == RunSpec().content_hash()
        on = parse_spec(RunSpec, ONLINE | {"record": {"checkpoint_every": 4}}, where="here")
        written = json.loads(on.canonical())
        assert (written["online"]["prompts"], written["record"]["checkpoint_every"]) == (16, 4)
        assert parse_spec(RunSpec, written, where="canonical") == on
        assert on.content_hash() != RunSpec().content_hash()

    def test_an_order_of_truncation_that_changes_nothing_is_refused(self):
        given = {"truncation_order": "vllm", "min_p": 0.1}
        with pytest.raises(SpecError, match="where both top_p and min_p truncate"):
            parse_spec(RunSpec, merge(ONLINE, {"online": given}), where="here")
        assert parse_spec(RunSpec, merge(ONLINE, {"online": given | {"top_p": 0.9}}), where="here")
