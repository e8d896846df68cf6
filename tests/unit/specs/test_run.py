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
            ({"layout": {"cp": 2, "order": "whole_documents"}}, "order 'whole_documents' moves tokens"),
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
