"""A task's prompts and rewards: what a user's class returns is taken, or refused by what it returned."""

import math
import re

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from tests.helpers.online_runs import Digits, fields, online_of, sampled, spec_of
from tests.helpers.same_bits import same_bits
from workbench.errors import SpecError
from workbench.policy.decoder import tiny_qwen3
from workbench.rollouts.task import SYMBOLS
from workbench.sharding.simulated import simulate
from workbench.specs.reading import merge
from workbench.train.seeds import seed_of

TASK = Digits()


class Wrong(Digits):
    """Goes wrong in one way."""

    def __init__(self, **how):
        self.how = how

    def prompts(self, seed, count):
        return super().prompts(seed, count)[: self.how.get("prompts")]

    def encode(self, text):
        return self.how.get("encode", super().encode(text))

    def reward(self, prompt, completion):
        return self.how.get("reward", 0.0)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"reward": math.nan}, r"reward of the completion '.+' to '\^.+='\n  found: nan"),
        ({"reward": math.inf}, "found: inf"),
        ({"prompts": 2}, "3 prompts of (.|\n)*found: 2\n"),
        ({"encode": []}, r"tokens of the prompt '\^.+='\n  found: \[\]"),
        ({"encode": [3, 19]}, r"found: \[3, 19\]\n  rule: +at least one, each from 0 to 18"),
        ({"encode": [-1]}, r"found: \[-1\]"),
        (
            {"encode": BatchEncoding({"input_ids": [3, 4]})},
            r"found: a BatchEncoding, (.|\n)*tokenizer\(text\)\.input_ids",
        ),
        ({"encode": "34"}, "found: a str, '34'"),
        ({"encode": [[3, 4]]}, r"found: a list, \[\[3, 4\]\]"),
        ({"encode": torch.tensor([[3, 4]])}, r"found: a Tensor, tensor\(\[\[3, 4\]\]\)"),
        ({"encode": [3.0]}, r"found: a list, \[3.0\]"),
        ({"encode": None}, "found: a NoneType, None"),
        (
            {"reward": None},
            r"reward of the completion '.+' to '\^.+='\n  found: None\n  rule: a reward is a finite number",
        ),
        ({"reward": "good"}, "found: 'good'"),
        ({"reward": torch.ones(2)}, r"found: tensor\(\[1., 1.\]\)"),
    ],
)
def test_a_task_with_unusable_results_is_refused(how, words):
    with pytest.raises(SpecError, match=words):
        online_of(spec_of(), task=Wrong(**how)).sample(0)


class Given(Digits):
    """Returns the values of its base class, in other types."""

    kind = staticmethod(torch.tensor)

    def prompts(self, seed, count):
        return (prompt for prompt in super().prompts(seed, count))

    def encode(self, text):
        return self.kind(super().encode(text))

    def reward(self, prompt, completion):
        return torch.tensor(super().reward(prompt, completion), dtype=torch.float64)


class GivenByNumpy(Given):
    kind = staticmethod(np.array)


@pytest.mark.parametrize("task", [Given(), GivenByNumpy()])
def test_tensors_arrays_and_generators_are_taken(task):
    local, usual = (fields(online_of(spec_of(), task=each).sample(0)[0]) for each in (task, TASK))
    assert local.keys() == usual.keys()
    assert all(same_bits(local[name], usual[name]) for name in usual)


class ByTable(Digits):
    """Reads ids in a table, as a user's task may; it does not declare how many it knows."""

    vocab_size = None

    def decode(self, tokens):
        return "".join(dict(enumerate(SYMBOLS))[token] for token in tokens)


@pytest.fixture(scope="module")
def wider(tmp_path_factory):
    """Settings of a policy of 40 ids."""
    folder = tmp_path_factory.mktemp("wider")
    tiny_qwen3(40).save_pretrained(folder)
    return {"model": {"source": str(folder)}}


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (Digits(), r"does not accept \(ShapeError\), of a policy of 40 ids and a task of 19\n"),
        (ByTable(), r"does not accept \(KeyError\), of a policy of 40 ids\n"),
    ],
)
def test_ids_unknown_to_the_task_are_named_with_the_model(task, words, wider):
    with pytest.raises(SpecError, match=words) as caught:
        online_of(spec_of(**wider), task=task).sample(0)
    asked = f"online.task = '{spec_of().online.task}' with model.source = '{wider['model']['source']}'"
    assert caught.value.parts["requested"] == asked
    unknown = re.match(r"a completion with the ids \[([\d, ]+)\]", caught.value.parts["found"])[1].split(", ")
    assert max(map(int, unknown)) >= 19
    assert "take a task with the tokenizer of this model" in caught.value.parts["fix"]


def test_a_task_of_fewer_ids_trains_where_it_reads_the_others_as_padding(wider):
    class Padding(Digits):
        def decode(self, tokens):
            return super().decode([token if token < self.vocab_size else self.pad_id for token in tokens])

    assert int(online_of(spec_of(**wider), task=Padding()).sample(0)[0].tokens_T.max()) >= 19


def test_other_errors_in_decode_are_raised_unchanged():
    class Broken(Digits):
        def decode(self, tokens):
            return {}["a slip"]

    with pytest.raises(KeyError, match="a slip"):
        online_of(spec_of(), task=Broken()).sample(0)


@pytest.mark.parametrize(
    "changes",
    [
        {"data": {"micro_batch_tokens": 24}},
        {"loss": {"name": "dpo"}, "online": {"answers": 2}, "data": {"micro_batch_tokens": 30}},
        {"data": {"micro_batch_tokens": 60, "keep_groups": True}},
    ],
)
def test_rows_too_short_for_the_longest_completion_are_refused_early(changes):
    spec = merge({"online": {"max_new_tokens": 20}}, changes)
    with pytest.raises(
        SpecError, match=rf"micro_batch_tokens = {changes['data']['micro_batch_tokens']} for completions"
    ):
        sampled(**spec)
    enough = merge(spec, {"data": {"micro_batch_tokens": 200}})
    assert sampled(**enough).num_documents in (6, 9)


def test_rows_are_as_large_as_their_multiple_allows():
    cut = {"layout": {"cp": 2, "order": "zigzag"}, "online": {"max_new_tokens": 12}}  # multiples of 4: 22 holds 20
    longest = max(len(TASK.encode(prompt)) for prompt in TASK.prompts(seed_of(0, 0), 3)) + 12
    with pytest.raises(SpecError, match=r"rows in multiples of 4(.|\n)*take at least"):
        sampled(**merge(cut, {"data": {"micro_batch_tokens": longest // 4 * 4 + 3}}))


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"cp": 2}, {"tp": 2}])
def test_prompts_that_differ_between_ranks_end_the_run_on_all_of_them(sizes):
    class OfRank(Digits):
        def __init__(self, mesh):
            self.rank = mesh["dp_cp"].rank + mesh["tp"].rank

        def prompts(self, seed, count):
            return super().prompts(seed + self.rank, count)

    def rank(mesh):
        with pytest.raises(SpecError, match="found: others on another rank"):
            online_of(spec_of(layout=sizes), mesh, task=OfRank(mesh)).sample(0)
        return True

    assert simulate(rank, **sizes) == [True, True]


def test_a_completion_beyond_the_models_positions_is_refused():
    with pytest.raises(SpecError, match=r"a completion of 510 tokens to '(.|\n)*a model of 512 positions"):
        sampled(online={"max_new_tokens": 510})
