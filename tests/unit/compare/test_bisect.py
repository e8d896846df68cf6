"""Bisection of two runs: a planted change is named with its block of tokens, and equal runs have none."""

from pathlib import Path

import pytest
import torch

from tests.helpers.planted_ulp import plant
from tests.helpers.vacuous_rollouts import ran
from workbench.compare import bisect as module
from workbench.compare.bisect import bisect
from workbench.errors import RecordError, SpecError
from workbench.records.directory import RunDirectory
from workbench.specs.run import RunSpec
from workbench.train import worker
from workbench.train.trace import INPUT
from workbench.train.worker import run_here

PROJECT = Path(__file__).parents[3]
BASE = RunSpec.model_validate(
    {
        "model": {"source": "tiny-qwen3"},
        "data": {"documents_per_step": 6, "micro_batches": 2},
        "optimizer": {"learning_rate": 1e-3},
        "loss": {"entropy_coefficient": 0.01},
    }
)
EXACT = BASE.merged({"reproducible": {"block_tokens": 8, "weight_chunks": 2}})
UP = "model.layers.1.mlp.up_proj"


def parted(a, b, **given):
    result = bisect(a, b, block_tokens=8, project=PROJECT, **given).divergence
    assert result is not None
    return result


def test_both_runs_are_repeated_with_the_same_rows():
    """The rows of the first, as many as both split evenly."""
    two_ranks = BASE.merged({"layout": {"dp": 2}, "data": {"micro_batches": 1, "balance": "work"}})
    assert module._same_rows([BASE, two_ranks]) == [{}, {"balance": "tokens"}]
    assert module._same_rows([two_ranks, BASE.merged({"data": {"micro_batches": 3}})]) == [
        {"micro_batches": 3},
        {"micro_batches": 6, "balance": "work"},
    ]


class TestPlanted:
    def test_one_bit_forward(self, monkeypatch):
        plant(monkeypatch, UP, place=17, loads=[1])
        divergence = parted(BASE, BASE)
        assert (divergence.step, divergence.way, divergence.tensor, divergence.row, divergence.block) == (
            0,
            "forward",
            UP,
            0,
            2,
        )
        assert (divergence.tokens, divergence.before, divergence.blocks) == ((16, 24), "model.layers.1.mlp.act_fn", 2)
        assert (
            f"step 0, forward: the output of {UP}, row 0, tokens 16 to 23 (block 2); 2 of its "
            in divergence.description
        )

    def test_one_bit_backward(self, monkeypatch):
        plant(monkeypatch, UP, place=17, loads=[1], backward=True)
        divergence = parted(BASE, BASE)
        assert (divergence.way, divergence.tensor, divergence.block) == ("backward", UP, 2)
        assert divergence.description.startswith(
            f"step 0, backward: the gradient of the output of {UP}, row 0, tokens 16 to 23"
        )

    def test_in_the_reproducible_mode_in_another_layout(self, monkeypatch):
        plant(monkeypatch, UP, place=3, loads=[1])  # the first of two ranks; its fourth token is the row's
        divergence = parted(EXACT, EXACT.merged({"layout": {"cp": 2, "order": "zigzag"}}))
        assert (divergence.way, divergence.tensor, divergence.block) == ("forward", UP, 0)

    def test_in_a_later_step(self, monkeypatch):
        step, calls = worker.flow.clip_gradients, []

        def grown(policy, norms, most):
            calls.append(None)
            if len(calls) == 6:  # one step of each run, then two of the first, and two of the second
                with torch.no_grad():
                    policy.model.get_submodule(UP).weight.grad[0, 0] *= -1
            return step(policy, norms, most)

        monkeypatch.setattr(worker.flow, "clip_gradients", grown)
        two = BASE.merged({"steps": 2})
        divergence = parted(two, two)
        assert (divergence.step, divergence.way, divergence.tensor) == (1, "weights", f"{UP}.weight")


class TestSettings:
    @pytest.mark.parametrize(
        ("changes", "way", "tensor"),
        [
            ({"policy": {"temperature": 0.9}}, "forward", "logprobs"),
            ({"loss": {"entropy_coefficient": 0.02}}, "loss", "entropy"),
            ({"optimizer": {"learning_rate": 2e-3}}, "weights", "model.embed_tokens.weight"),
            ({"precision": "bfloat16"}, "forward", "model.embed_tokens"),
            ({"faults": ["entropy_without_gradient"]}, "backward", "model.norm"),
        ],
    )
    def test_each_parts_where_it_acts(self, changes, way, tensor):
        divergence = parted(BASE, BASE.merged(changes))
        assert (divergence.way, divergence.tensor) == (way, tensor)

    def test_sums_over_ranks_are_distinguished_from_their_inputs(self):
        tp2 = EXACT.merged({"layout": {"tp": 2}})
        divergence = parted(tp2, tp2.merged({"reproducible": {"bits": 12}}))
        assert (divergence.way, divergence.tensor, divergence.block) == ("gradients", "model.norm.weight", None)
        assert (
            divergence.description == "step 0, gradients: the gradient of model.norm.weight, whose pieces were the same"
        )

    def test_ordinary_blocks_of_another_size(self):
        divergence = parted(EXACT, EXACT.merged({"reproducible": {"block_tokens": 16}}))
        assert divergence.way == "forward"
        assert divergence.tensor.startswith("model.layers.0.")


class TestEqual:
    def test_a_repeated_run(self):
        bisection = bisect(BASE, BASE, project=PROJECT)
        assert bisection.equal
        text, seen, *warnings = str(bisection).splitlines()
        assert text == "a and b: the same bits in 1 step: 59 tensors on the way, the loss, every gradient and weight"
        assert seen.startswith("  could have seen: gradient on ")
        assert [line.startswith("  warning: ") for line in warnings] == [True] * len(bisection.evidence.warnings)

    def test_layouts_of_the_reproducible_mode(self):
        bisection = bisect(EXACT, EXACT.merged({"layout": {"dp": 2, "tp": 2}}), names=("one", "four"), project=PROJECT)
        assert bisection.equal
        assert str(bisection).splitlines()[1] == (
            "  one was run with data.micro_batches = 4, so that both have the same rows"
        )

    @pytest.mark.parametrize("case", ["advantages of zero", "empty loss mask", "equal rewards"])
    def test_the_same_bits_of_nothing_are_vacuous(self, case, tmp_path):
        spec = ran(tmp_path, case, "one").spec
        bisection = bisect(spec, spec.merged({"optimizer": {"weight_decay": 0.0}}), project=PROJECT)
        assert (bisection.verdict, bisection.equal, bisection.divergence) == ("vacuous", False, None)
        assert str(bisection).startswith("a and b: vacuous, no ")

    def test_the_same_bits_that_are_not_finite_are_an_unsound_baseline(self):
        result = module.Bisection("a", "b", None, 1, 59, {}, not_finite="step 0: the loss is nan")
        assert (result.verdict, result.equal) == ("unsound baseline", False)
        assert str(result).startswith("a and b: unsound baseline, step 0: the loss is nan: the same bits in 1 step")


class TestRuns:
    @pytest.fixture
    def ran(self, tmp_path):
        def run(name, spec):
            directory = RunDirectory.create(tmp_path / "runs", name, spec)
            run_here(directory, PROJECT)
            return directory

        return run

    def test_traces_that_are_there_are_read(self, ran, monkeypatch):
        traced = BASE.merged({"record": {"certificate": True, "trace_tokens": 8}})
        one, two = ran("one", traced), ran("two", traced.merged({"policy": {"temperature": 0.9}}))
        monkeypatch.setattr(module, "run_here", None)
        bisection = bisect(one, two)
        assert (bisection.a, bisection.b, bisection.divergence.tensor) == ("one", "two", "logprobs")
        assert bisect(one.path, str(one.path)).equal

    def test_other_runs_are_repeated_up_to_the_differing_step(self, ran, monkeypatch):
        certified = BASE.merged({"record": {"certificate": True}, "steps": 3})
        one, two = ran("one", certified), ran("two", certified.merged({"optimizer": {"learning_rate": 2e-3}}))
        again, steps = module.run_here, []

        def counted(run, project):
            steps.append(run.spec.steps)
            again(run, project)

        monkeypatch.setattr(module, "run_here", counted)
        assert bisect(one, two, project=PROJECT).divergence.way == "weights"
        assert steps == [1, 1]

    def test_clip_decisions_of_another_run_are_reused(self, ran):
        ran("one", BASE)
        taker = ran("taker", BASE.merged({"frozen_clip": "one"}))
        assert bisect(taker, taker, project=PROJECT).equal

    def test_a_yaml_file_is_a_spec_and_an_experiment_is_none(self, ran, tmp_path):
        file = tmp_path / "spec.yaml"
        file.write_text("model: {source: tiny-qwen3}\ndata: {documents_per_step: 6}\n")
        assert bisect(file, str(file), project=PROJECT).equal
        ran("one", BASE)
        ran("two", BASE)
        with pytest.raises(RecordError, match="an experiment of 2 runs"):
            bisect(tmp_path, BASE, project=PROJECT)


class TestRows:
    def test_rows_of_other_tokens_are_refused(self):
        with pytest.raises(RecordError, match="rows of other tokens"):
            bisect(BASE, BASE.merged({"data": {"documents_per_step": 5}}), project=PROJECT)

    def test_padding_at_the_end_of_a_row_is_none_of_it(self):
        assert bisect(EXACT, EXACT.merged({"data": {"multiple_of": 160}}), project=PROJECT).equal

    def test_inputs_are_labelled(self):
        words = module.Divergence(0, "forward", f"x{INPUT}", 1, 0, (0, 8), 1, 2, "y").description
        assert words == (
            "step 0, forward: the input of x (from attention, a sum or a product before it), row 1, "
            "tokens 0 to 7 (block 0); 1 of its 2 blocks differ; the same until y"
        )


class TestExpertsAndStages:
    """Experts on several ranks are traced like any layer; of a pipeline no rank has them all."""

    MIXTURE = RunSpec.model_validate(
        {
            "model": {"source": "tiny-qwen3-moe"},
            "precision": "float64",
            "data": {"documents_per_step": 4},
            "layout": {"dp": 2, "ep": 2},
        }
    )

    def test_the_first_difference_of_two_degrees_is_in_a_mixture(self):
        alone = self.MIXTURE.merged({"layout": {"ep": 1}})
        divergence = parted(alone, self.MIXTURE)
        assert divergence.way == "forward"
        assert divergence.tensor.startswith("model.layers.0.mlp")
        assert divergence.before == "model.layers.0.post_attention_layernorm"

    def test_a_gradient_of_experts_is_named(self):
        divergence = parted(self.MIXTURE, self.MIXTURE.merged({"faults": ["expert_gradients_times_ep"]}))
        assert (divergence.way, "experts" in divergence.tensor) == ("gradients", True)

    def test_pipeline_stages_are_refused_by_name(self):
        with pytest.raises(SpecError, match=r"bisect b\n.*layout\.pp = 2(.|\n)*workbench diagnose"):
            bisect(BASE, BASE.merged({"layout": {"pp": 2}}), project=PROJECT)
