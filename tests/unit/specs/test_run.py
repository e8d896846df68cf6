"""A spec refuses what it does not know, in words, and has one identity."""

from __future__ import annotations

import json
from typing import ClassVar

import pytest

from workbench.errors import SpecError
from workbench.rollouts.advantages.registry import ESTIMATORS
from workbench.specs.run import AdvantageSpec, LayoutSpec, RunSpec, load_run_spec, merge, parse_spec


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

    def test_a_key_like_no_other_lists_what_is_known(self):
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
    def test_what_is_not_exact_is_refused_in_words(self, settings, words):
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
        assert RunSpec().content_hash() == "8e3917fd"
        on = RunSpec(reproducible=self.ON)
        assert parse_spec(RunSpec, json.loads(on.canonical()), where="canonical") == on
        assert on.content_hash() != RunSpec().content_hash()


class TestCertified:
    @pytest.mark.parametrize(
        ("reproducible", "asked", "expected"),
        [({}, None, False), ({}, True, True), ({"block_tokens": 8}, None, True), ({"block_tokens": 8}, False, False)],
    )
    def test_in_the_reproducible_mode_unless_said_otherwise(self, reproducible, asked, expected):
        assert RunSpec(reproducible=reproducible, record={"certificate": asked}).certified == expected

    @pytest.mark.parametrize("record", [{"certificate": False}, {"trace_tokens": 64}])
    def test_what_is_asked_is_of_the_run_and_what_is_not_changes_nothing(self, record):
        spec = RunSpec(record=record)
        assert parse_spec(RunSpec, json.loads(spec.canonical()), where="canonical") == spec
        assert spec.content_hash() != "8e3917fd" == RunSpec().content_hash()


class TestMerging:
    def test_nested_settings_merge_key_by_key(self):
        before = RunSpec(loss={"surrogate": {"clip_low": 0.1, "clip_high": 0.3}})
        spec = before.merged({"loss": {"surrogate": {"clip_low": 0.2}}, "steps": 4})
        assert (spec.loss.surrogate.clip_low, spec.loss.surrogate.clip_high, spec.steps) == (0.2, 0.3, 4)

    def test_neither_side_is_changed(self):
        base, changes = {"loss": {"clip_low": 0.1}}, {"loss": {"clip_high": 0.3}}
        merge(base, changes)
        assert (base, changes) == ({"loss": {"clip_low": 0.1}}, {"loss": {"clip_high": 0.3}})


class TestLayout:
    def test_world_size_is_the_product(self):
        assert LayoutSpec(dp=2, cp=3, tp=2).world_size == 12

    @pytest.mark.parametrize(
        ("layout", "words"),
        [
            (LayoutSpec(), "one rank"),
            (LayoutSpec(tp=2), "tp=2"),
            (LayoutSpec(dp=2, cp=2, order="zigzag"), "dp=2 cp=2 zigzag"),
            (LayoutSpec(cp=2, attention="ring"), "cp=2 contiguous ring"),
            (
                LayoutSpec(cp=4, order="balanced", block_tokens=16, attention="hybrid", ulysses=2),
                "cp=4 balanced blocks=16 hybrid ulysses=2",
            ),
            (LayoutSpec(attention="ring", order="zigzag"), "one rank"),  # says nothing where nothing is shared
            (LayoutSpec(tp=2, kernel="plain", sequence_parallel=True), "tp=2 plain sp"),
            (LayoutSpec(dp=2, shard_parameters=True, checkpointing=True), "dp=2 fsdp checkpointing"),
            (LayoutSpec(checkpointing=True), "one rank checkpointing"),
        ],
    )
    def test_says_itself_in_words(self, layout, words):
        assert str(layout) == words

    @pytest.mark.parametrize(
        ("layout", "words"),
        [
            ({"cp": 4, "ulysses": 2}, "ulysses = 2 with attention 'gathered'"),
            ({"cp": 4, "attention": "ulysses", "ulysses": 2}, "attention ulysses takes all of cp"),
            ({"cp": 4, "attention": "hybrid", "ulysses": 3}, "ulysses = 3 does not divide cp = 4"),
            ({"cp": 4, "attention": "hybrid"}, "with ulysses = 1 is attention 'ring'"),
        ],
    )
    def test_neighbours_that_make_no_sense_are_refused_in_words(self, layout, words):
        with pytest.raises(SpecError, match=words):
            parse_spec(RunSpec, {"layout": layout}, where="here")

    @pytest.mark.parametrize(
        ("kernel", "precision", "words"),
        [
            ("flash", "float32", "found: layout.kernel 'flash' computes in bfloat16, and precision is float32"),
            (
                "flex",
                "float64",
                "found: layout.kernel 'flex' computes in bfloat16 or float32, and precision is float64",
            ),
        ],
    )
    def test_a_kernel_that_does_not_compute_the_precision_is_refused_at_once(self, kernel, precision, words):
        with pytest.raises(SpecError, match=words):
            parse_spec(RunSpec, {"layout": {"kernel": kernel}, "precision": precision}, where="here")
        assert RunSpec(layout={"kernel": kernel}, precision="bfloat16").layout.kernel == kernel

    def test_on_one_rank_every_attention_is_the_same(self):
        assert {LayoutSpec(attention=name).world_size for name in ("gathered", "ring", "ulysses", "hybrid")} == {1}


def test_every_estimator_of_advantages_can_be_named():
    known = AdvantageSpec.model_fields["name"].annotation.__args__
    assert set(known) == {"recorded", *ESTIMATORS}


def test_a_loss_without_its_constant_is_refused_before_anything_runs():
    with pytest.raises(SpecError, match="denominator_constant, which is not given"):
        parse_spec(RunSpec, {"loss": {"name": "dr_grpo"}}, where="settings")
    assert RunSpec(loss={"name": "dr_grpo", "denominator_constant": 64.0}).loss.denominator_constant == 64.0


@pytest.mark.parametrize(
    "correction", [{"kind": "icepop", "denominator": "survivors"}, {"kind": "geometric_gate", "denominator": "gated"}]
)
def test_a_run_cannot_count_what_the_live_policy_keeps(correction):
    with pytest.raises(SpecError, match="before its forward pass"):
        parse_spec(RunSpec, {"loss": {"old_policy": "current", "correction": correction}}, where="settings")
    assert RunSpec(loss={"correction": correction}).loss.correction.denominator == correction["denominator"]


ONLINE = {"online": {"task": "arithmetic"}, "data": {"advantages": {"name": "grpo"}}}


class TestOnline:
    def test_a_task_asks_for_it(self):
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
    def test_what_does_not_go_with_it_is_refused(self, changes, words):
        with pytest.raises(SpecError, match=f"online: .*{words}"):
            parse_spec(RunSpec, merge(ONLINE, changes), where="here")

    def test_all_that_is_wrong_is_said_at_once(self):
        with pytest.raises(SpecError, match=r"advantages; name(.|\n)*; frozen_clip takes"):
            parse_spec(RunSpec, {"online": {"task": "arithmetic"}, "frozen_clip": "other"}, where="here")

    def test_what_goes_with_it_is_taken(self):
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

    def test_who_does_not_ask_for_it_keeps_his_identity(self):
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
