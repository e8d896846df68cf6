"""Sizes of a decoder without building it: those of the model, and nothing that its configuration does not state."""

import json

import pytest

from workbench.errors import ShardingError, SpecError
from workbench.policy import sizes
from workbench.policy.decoder import TINY, check_tied
from workbench.records.provenance import project_root


@pytest.mark.parametrize("source", TINY)
def test_sizes_of_tiny_models_are_those_of_the_built_ones(source):
    config = TINY[source](sizes.TINY_VOCABULARY).config
    assert sizes.read_sizes(source, project_root()) == sizes.sizes_of(config.to_dict())


def test_the_checkpoint_of_the_repository():
    assert sizes.read_sizes("data/arithmetic/policy", project_root()) == sizes.Sizes(4, 2, 19, 192, layers=3)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_attention_heads": 8}, (8, 8, None, None)),
        ({"n_head": 12, "vocab_size": 50257, "n_inner": None}, (12, 12, 50257, None)),
        ({"text_config": {"num_attention_heads": 4, "intermediate_size": 12}}, (4, 4, None, 12)),
        ({"num_attention_heads": 4, "intermediate_size": 12, "num_experts": 8}, (4, 4, None, None, 8)),
        ({"num_attention_heads": [4, 8], "vocab_size": True}, (None, None, None, None)),
    ],
)
def test_only_what_is_stated_is_known(config, expected):
    assert sizes.sizes_of(config) == sizes.Sizes(*expected)


def test_a_hub_id_is_not_looked_up(tmp_path):
    assert sizes.read_sizes("owner/name", tmp_path) is None


@pytest.mark.parametrize(("text", "result"), [("[]", None), (json.dumps({}), sizes.Sizes(None, None, None, None))])
def test_a_configuration_without_sizes_is_left_to_the_ranks(tmp_path, text, result):
    (tmp_path / "config.json").write_text(text)
    found = sizes.read_sizes(".", tmp_path)
    assert found == result
    if found:
        sizes.check_layout(found, tp=64, dealt=64, weight_chunks=64)


def test_a_damaged_configuration_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SpecError, match=r"config.json\n  found: JSONDecodeError"):
        sizes.read_sizes(".", tmp_path)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"tp": 4}, "2 key/value heads"),
        ({"tp": 1, "dealt": 8}, "heads dealt to 8 ranks"),
        ({"tp": 2, "dealt": 4}, "2 query heads and 1 key/value heads"),
        ({"tp": 1, "weight_chunks": 4}, "weight_chunks = 4"),
    ],
)
def test_a_layout_that_does_not_divide_the_model(layout, words):
    with pytest.raises((ShardingError, SpecError), match=words):
        sizes.check_layout(sizes.Sizes(4, 2, 19, 192), **layout)


def test_more_pipeline_stages_than_layers():
    """The last stage may have the head alone."""
    model = sizes.Sizes(4, 2, 19, 192, layers=3)
    sizes.check_layout(model, tp=1, pp=2, stages_per_rank=2)
    with pytest.raises(ShardingError, match="pp=3 x stages_per_rank=2 = 6 stages"):
        sizes.check_layout(model, tp=1, pp=3, stages_per_rank=2)


def test_experts_that_ranks_cannot_share():
    mixture = sizes.Sizes(4, 2, 19, None, 4)
    sizes.check_layout(mixture, tp=1, ep=2)
    with pytest.raises(ShardingError, match="4 experts in the model"):
        sizes.check_layout(mixture, tp=1, ep=3)


@pytest.mark.parametrize(("model", "words"), [((6, 6, 19, 193), "193 features"), ((6, 6, 7, 192), "pieces of 2")])
def test_features_and_vocabulary(model, words):
    with pytest.raises(ShardingError, match=words):
        sizes.check_layout(sizes.Sizes(*model), tp=6)


def test_settings_of_the_policy():
    sizes.check_whole_vocabulary("reference", 1)
    with pytest.raises(SpecError, match="reference needs the whole vocabulary"):
        sizes.check_whole_vocabulary("reference", 2)
    check_tied("tiny-qwen3", False)
    with pytest.raises(SpecError, match="a checkpoint defines"):
        check_tied("data/arithmetic/policy", False)
