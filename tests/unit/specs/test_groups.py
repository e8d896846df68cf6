"""Groups of settings refuse what contradicts itself, and describe themselves."""

import pytest

from workbench.errors import SpecError
from workbench.rollouts.advantages.registry import ESTIMATORS
from workbench.specs.groups import AdvantageSpec, LayoutSpec, PolicySpec
from workbench.specs.reading import parse_spec
from workbench.specs.run import RunSpec


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
            (LayoutSpec(attention="ring", order="zigzag"), "one rank"),  # has no effect without sharing
            (LayoutSpec(tp=2, kernel="plain", sequence_parallel=True), "tp=2 plain sp"),
            (LayoutSpec(dp=2, shard_parameters=True, checkpointing=True), "dp=2 fsdp checkpointing"),
            (LayoutSpec(dp=2, shard_parameters=True, reshard_after_forward=False), "dp=2 fsdp no_reshard"),
            (LayoutSpec(dp=2, shard_parameters=True, unit_layers=4), "dp=2 fsdp unit_layers=4"),
            (LayoutSpec(checkpointing=True), "one rank checkpointing"),
        ],
    )
    def test_describes_itself(self, layout, words):
        assert str(layout) == words

    @pytest.mark.parametrize(
        ("layout", "words"),
        [
            ({"dp": 4, "shard_ranks": 2}, "shard_ranks = 2 without shard_parameters"),
            ({"dp": 4, "shard_parameters": True, "shard_ranks": 1}, "shard_ranks = 1 gives each rank a whole copy"),
            ({"dp": 4, "shard_parameters": True, "shard_ranks": 3}, "shard_ranks = 3 does not divide dp"),
            ({"dp": 4, "shard_parameters": True, "shard_ranks": 2, "ep": 2}, "shard_ranks = 2 with ep = 2"),
            ({"dp": 2, "reshard_after_forward": False}, "reshard_after_forward = False without shard_parameters"),
            ({"dp": 2, "unit_layers": 2}, "unit_layers = 2 without shard_parameters"),
            ({"pp": 2, "dp": 2, "shard_parameters": True, "unit_layers": 2}, "unit_layers = 2 with pp = 2"),
            (
                {"pp": 2, "dp": 2, "shard_parameters": True, "reshard_after_forward": False},
                "reshard_after_forward = False with pp = 2",
            ),
            ({"cp": 4, "ulysses": 2}, "ulysses = 2 with attention 'gathered'"),
            ({"cp": 4, "attention": "ulysses", "ulysses": 2}, "attention ulysses takes all of cp"),
            ({"cp": 4, "attention": "hybrid", "ulysses": 3}, "ulysses = 3 does not divide cp = 4"),
            ({"cp": 4, "attention": "hybrid"}, "with ulysses = 1 is attention 'ring'"),
        ],
    )
    def test_conflicting_settings_are_refused(self, layout, words):
        with pytest.raises(SpecError, match=words):
            parse_spec(RunSpec, {"layout": layout}, where="here")

    @pytest.mark.parametrize(
        ("kernel", "precision", "words"),
        [
            (
                "flash",
                "float32",
                "kernel 'flash' computes in bfloat16 or float16, and the run in float32",
            ),
            (
                "flex",
                "float64",
                "found: layout.kernel 'flex' computes in bfloat16 or float16 or float32, and the run in float64",
            ),
        ],
    )
    def test_a_kernel_without_the_precision_is_refused_at_once(self, kernel, precision, words):
        with pytest.raises(SpecError, match=words):
            parse_spec(RunSpec, {"layout": {"kernel": kernel}, "precision": precision}, where="here")
        assert RunSpec(layout={"kernel": kernel}, precision="bfloat16").layout.kernel == kernel

    def test_on_one_rank_every_attention_is_the_same(self):
        assert {LayoutSpec(attention=name).world_size for name in ("gathered", "ring", "ulysses", "hybrid")} == {1}


def test_every_estimator_of_advantages_can_be_named():
    known = AdvantageSpec.model_fields["name"].annotation.__args__
    assert set(known) == {"recorded", *ESTIMATORS}


def test_the_default_of_chunk_tokens_leaves_the_rows_to_the_head():
    assert PolicySpec().chunk_rows is None
    assert PolicySpec(logprobs="chunked", chunk_tokens=8).chunk_rows == 8
