"""A spec refuses unknown settings, and has one identity."""

from __future__ import annotations

import json
from typing import ClassVar

import pytest

from workbench.errors import SpecError
from workbench.specs.reading import merge, parse_spec
from workbench.specs.run import RunSpec


class TestIdentity:
    def test_canonical_json_comes_back_as_the_same_spec(self):
        spec = RunSpec(layout={"cp": 2, "order": "zigzag"}, precision="float64", faults="missing_cp_factor")
        assert spec.faults == ("missing_cp_factor",)
        again = parse_spec(RunSpec, json.loads(spec.canonical()), where="canonical")
        assert again == spec
        assert again.content_hash() == spec.content_hash()

    def test_writing_a_default_out_changes_nothing(self):
        assert RunSpec(steps=1, layout={"cp": 1}).content_hash() == RunSpec().content_hash()

    def test_every_setting_changes_the_hash(self):
        base = RunSpec()
        changes = [
            {"steps": 2},
            {"seed": 1},
            {"precision": "float64"},
            {"layout": {"dp": 2}},
            {"loss": {"kl": {"coefficient": 0.1}}},
            {"data": {"path": "elsewhere"}},
            {"faults": ["x"]},
        ]
        hashes = {base.merged(change).content_hash() for change in changes}
        assert len(hashes | {base.content_hash()}) == len(changes) + 1


class TestReproducible:
    ON: ClassVar = {"block_tokens": 16, "weight_chunks": 2}

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"precision": "float64"}, "precision float64 has more bits"),
            ({"layout": {"cp": 2, "order": "striped"}}, "order 'striped' moves tokens and not whole blocks of 16"),
            ({"layout": {"cp": 2, "order": "document_zigzag"}}, "order 'document_zigzag' moves tokens"),
            ({"layout": {"cp": 2, "order": "balanced", "block_tokens": 24}}, "reproducible.block_tokens = 16 does not"),
            ({"layout": {"cp": 2, "attention": "ring"}}, "attention 'ring' sums in the order of its ranks"),
            ({"layout": {"kernel": "plain"}}, "kernel 'plain' is not the attention kernel"),
            ({"layout": {"tp": 2, "sequence_parallel": True}}, "sequence_parallel sums"),
            ({"layout": {"tp": 4}}, "weight_chunks = 2 cannot be split over tp = 4"),
            (
                {"policy": {"fused_loss": True, "chunk_tokens": 8}},
                "policy.fused_loss and policy.chunk_tokens: the head",
            ),
            ({"policy": {"logprobs": "chunked"}}, "policy.logprobs: the head is fixed"),
            ({"precision": "bfloat16", "optimizer": {"name": "sgd"}}, "sgd in bfloat16"),
            ({"faults": ["missing_cp_factor"]}, "fault 'missing_cp_factor': known bugs"),
        ],
    )
    def test_inexact_settings_are_refused(self, settings, words):
        parse_spec(RunSpec, settings, where="the ordinary mode")
        with pytest.raises(SpecError, match=words):
            parse_spec(RunSpec, settings | {"reproducible": self.ON}, where="here")

    @pytest.mark.parametrize(
        "layout",
        [
            {"dp": 2, "tp": 2, "shard_parameters": True},
            {"cp": 2, "order": "zigzag", "checkpointing": True},
            {"cp": 4, "order": "balanced", "block_tokens": 32},
            {"order": "striped", "attention": "ring"},
        ],
    )
    def test_layouts_that_move_whole_blocks_are_not(self, layout):
        assert RunSpec(layout=layout, reproducible=self.ON).reproducible.on

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"bits": 20}, "which block_tokens turns on"),
            ({"block_tokens": 8, "weight_chunks": 3}, "no power of two"),
            ({"block_tokens": 0}, "greater than or equal to 1"),
            ({"block_tokens": 8, "bits": 61}, "less than or equal"),
        ],
    )
    def test_settings_of_the_mode_that_mean_nothing_are_refused(self, settings, words):
        with pytest.raises(SpecError, match=words):
            parse_spec(RunSpec, {"reproducible": settings}, where="here")

    def test_runs_without_it_are_those_that_they_were(self):
        assert "reproducible" not in json.loads(RunSpec().canonical())
        assert RunSpec().content_hash() == "b7a88445"
        on = RunSpec(reproducible=self.ON)
        assert parse_spec(RunSpec, json.loads(on.canonical()), where="canonical") == on
        assert on.content_hash() != RunSpec().content_hash()


class TestTruncatedSampler:
    ONLINE: ClassVar = {"online": {"task": "arithmetic"}, "data": {"advantages": {"name": "grpo"}}}

    def test_an_online_run_without_it_is_the_one_that_it_was(self):
        """The hash is that of the code before the settings of a truncated sampler."""
        assert RunSpec.model_validate(self.ONLINE).content_hash() == "07a4d117"

    @pytest.mark.parametrize("more", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"sampler_logprobs": "raw"}])
    def test_each_setting_is_part_of_the_identity(self, more):
        plain = RunSpec.model_validate(self.ONLINE)
        spec = plain.merged({"online": more})
        assert parse_spec(RunSpec, json.loads(spec.canonical()), where="canonical") == spec
        assert spec.content_hash() != plain.content_hash()

    def test_the_support_of_the_policy_is_part_of_the_identity(self):
        assert RunSpec(policy={"support": "recorded"}).content_hash() != RunSpec().content_hash()


class TestCertified:
    @pytest.mark.parametrize(
        ("reproducible", "asked", "expected"),
        [({}, None, False), ({}, True, True), ({"block_tokens": 8}, None, True), ({"block_tokens": 8}, False, False)],
    )
    def test_is_on_in_the_reproducible_mode_unless_set(self, reproducible, asked, expected):
        assert RunSpec(reproducible=reproducible, record={"certificate": asked}).certified == expected

    @pytest.mark.parametrize("record", [{"certificate": False}, {"trace_tokens": 64}])
    def test_a_request_is_part_of_the_identity_and_the_default_is_not(self, record):
        spec = RunSpec(record=record)
        assert parse_spec(RunSpec, json.loads(spec.canonical()), where="canonical") == spec
        assert spec.content_hash() != "b7a88445" == RunSpec().content_hash()


class TestMerging:
    def test_nested_settings_merge_key_by_key(self):
        before = RunSpec(loss={"surrogate": {"clip_low": 0.1, "clip_high": 0.3}})
        spec = before.merged({"loss": {"surrogate": {"clip_low": 0.2}}, "steps": 4})
        assert (spec.loss.surrogate.clip_low, spec.loss.surrogate.clip_high, spec.steps) == (0.2, 0.3, 4)

    def test_neither_side_is_changed(self):
        base, changes = {"loss": {"clip_low": 0.1}}, {"loss": {"clip_high": 0.3}}
        merge(base, changes)
        assert (base, changes) == ({"loss": {"clip_low": 0.1}}, {"loss": {"clip_high": 0.3}})


def test_a_loss_without_its_constant_is_refused_before_anything_runs():
    with pytest.raises(SpecError, match="denominator_constant, which is not given"):
        parse_spec(RunSpec, {"loss": {"name": "dr_grpo"}}, where="settings")
    assert RunSpec(loss={"name": "dr_grpo", "denominator_constant": 64.0}).loss.denominator_constant == 64.0


@pytest.mark.parametrize(
    "correction", [{"kind": "icepop", "denominator": "survivors"}, {"kind": "geometric_gate", "denominator": "gated"}]
)
def test_survivors_of_the_live_policy_cannot_be_counted(correction):
    with pytest.raises(SpecError, match="before its forward pass"):
        parse_spec(RunSpec, {"loss": {"old_policy": "current", "correction": correction}}, where="settings")
    assert RunSpec(loss={"correction": correction}).loss.correction.denominator == correction["denominator"]


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
