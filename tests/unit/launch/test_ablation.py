"""An ablation expands into named runs, and every error in it is reported before anything starts."""

from __future__ import annotations

import re

import pytest

from workbench.errors import SpecError
from workbench.launch.ablation import AblationSpec, load_ablation, select
from workbench.records.provenance import project_root

TEXT = """
question: Same gradient?
base: {steps: 4, loss: {surrogate: {clip_high: 0.28}}}
axes: {precision: [float64, float32]}
reference: one_rank
truth: one_rank-float64
configurations:
  one_rank: {}
  cp2: {layout: {cp: 2, order: zigzag}, loss: {surrogate: {clip_low: 0.1}}}
extra:
  fault: {precision: float32, layout: {cp: 2}, faults: [missing_cp_factor]}
"""


@pytest.fixture
def write(tmp_path):
    def write(text, name="ablation.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


class TestExpansion:
    def test_every_configuration_meets_every_value(self, write):
        planned = load_ablation(write(TEXT)).expand()
        assert [(run.name, run.reference, run.truth) for run in planned] == [
            ("one_rank-float64", "", ""),
            ("one_rank-float32", "", "one_rank-float64"),
            ("cp2-float64", "one_rank-float64", "one_rank-float64"),
            ("cp2-float32", "one_rank-float32", "one_rank-float64"),
            ("fault", "one_rank-float32", "one_rank-float64"),
        ]

    def test_settings_are_base_then_axis_then_configuration(self, write):
        runs = {run.name: run.spec for run in load_ablation(write(TEXT)).expand()}
        spec = runs["cp2-float64"]
        assert (spec.steps, spec.precision, spec.layout.cp) == (4, "float64", 2)
        assert (spec.loss.surrogate.clip_low, spec.loss.surrogate.clip_high) == (0.1, 0.28)
        assert runs["fault"].faults == ("missing_cp_factor",)
        assert runs["one_rank-float32"].layout.world_size == 1

    def test_a_configuration_overrides_the_base(self):
        ablation = AblationSpec(
            reference="a",
            base={"steps": 4, "loss": {"surrogate": {"clip_low": 0.1}}},
            truth="t",
            configurations={"a": {}, "b": {"seed": 2, "loss": {"surrogate": {"clip_low": 0.3}}}},
            extra={"t": {"precision": "float64"}},
        )
        runs = {run.name: run.spec for run in ablation.expand()}
        assert [(runs[name].seed, runs[name].loss.surrogate.clip_low) for name in "ab"] == [(0, 0.1), (2, 0.3)]

    def test_references_and_truth_come_first_in_any_order(self):
        ablation = AblationSpec(
            reference="z",
            truth="exact",
            base={"precision": "float64"},
            configurations={"a": {}, "z": {}},
            extra={"exact": {}},
        )
        assert [run.name for run in ablation.expand()] == ["z", "exact", "a"]

    @pytest.mark.parametrize("axes", [{}, {"precision": ["float32", "bfloat16"]}])
    def test_a_truth_without_a_reference_of_its_precision_has_none(self, axes):
        ablation = AblationSpec(
            reference="a",
            truth="exact",
            configurations={"a": {}, "b": {"seed": 1}},
            axes=axes,
            extra={"exact": {"precision": "float64"}},
        )
        runs = {run.name: run for run in ablation.expand()}
        assert (runs["exact"].reference, runs["exact"].truth) == ("", "")
        assert {run.truth for run in runs.values()} == {"", "exact"}

    def test_without_a_run_below_float64_no_truth_is_needed(self):
        ablation = AblationSpec(
            reference="a", base={"precision": "float64"}, configurations={"a": {}, "b": {"seed": 1}}
        )
        assert [(run.reference, run.truth) for run in ablation.expand()] == [("", ""), ("a", "")]

    def test_two_axes_one_of_them_nested(self):
        ablation = AblationSpec(
            reference="a",
            configurations={"a": {}, "b": {"seed": 2}},
            truth="a-float64-0.001",
            axes={"precision": ["float64", "float32"], "optimizer.learning_rate": [0.001, 0.01]},
            extra={"c": {"optimizer": {"learning_rate": 0.01}}},
        )
        runs = {run.name: run for run in ablation.expand()}
        assert len(runs) == 9
        assert runs["b-float32-0.01"].reference == "a-float32-0.01"
        assert runs["b-float32-0.01"].spec.optimizer.learning_rate == 0.01
        assert runs["c"].reference == "a-float32-0.01"  # float32 is the default of precision

    def test_the_ablation_that_we_ship(self):
        planned = load_ablation(project_root() / "experiments/layout_parity/ablation.yaml").expand()
        assert len(planned) == 35
        assert {run.reference for run in planned} == {"", "one_rank-float64", "one_rank-float32"}
        assert max(run.world_size for run in planned) == 4

    def test_one_spec_is_an_ablation_of_one_run(self, write):
        [run] = load_ablation(write("steps: 2\nlayout: {tp: 2}\n", "mine.yaml")).expand()
        assert (run.name, run.reference, run.spec.steps, run.world_size) == ("mine", "", 2, 2)


class TestRefusals:
    def refused(self, path):
        with pytest.raises(SpecError) as caught:
            load_ablation(path)
        return str(caught.value)

    def test_a_misspelt_key_names_the_nearest(self, write):
        message = self.refused(write(TEXT.replace("configurations:", "configuratoins:")))
        assert "unknown key 'configuratoins' (did you mean 'configurations'?)" in message

    def test_a_misspelt_setting_names_the_configuration_too(self, write):
        message = self.refused(write(TEXT.replace("layout: {cp: 2, order", "layuot: {cp: 2, order")))
        assert "cp2-float64, cp2-float32: unknown key 'layuot' (did you mean 'layout'?)" in message
        assert "2 of 5 runs cannot be used" in message

    def test_a_misspelt_setting_in_one_spec(self, write):
        assert "did you mean 'precision'" in self.refused(write("precison: float64", "mine.yaml"))

    def test_one_name_twice_in_the_file(self, write):
        message = self.refused(write(TEXT.replace("  cp2: {", "  one_rank: {}\n  cp2: {")))
        assert "'one_rank' on line 8 and again on line 9" in message

    def test_an_extra_with_the_name_of_a_run(self, write):
        message = self.refused(write(TEXT.replace("  fault:", "  cp2-float32:")))
        assert "two runs of one name" in message
        assert "cp2-float32" in message

    @pytest.mark.parametrize("key", ["reference", "truth"])
    def test_a_reference_or_truth_that_is_not_there(self, write, key):
        message = self.refused(write(TEXT.replace(f"{key}: one_rank", f"{key}: one_rnak")))
        assert f"{key} 'one_rnak" in message
        assert "did you mean 'one_rank" in message

    def test_an_extra_without_a_reference_of_its_kind(self, write):
        message = self.refused(write(TEXT.replace("{precision: float32", "{precision: bfloat16")))
        assert "extra 'fault' has no reference" in message
        assert "precision=bfloat16" in message

    def test_a_configuration_that_sets_an_axis(self, write):
        message = self.refused(write(TEXT.replace("one_rank: {}", "one_rank: {precision: float64}")))
        assert "configuration 'one_rank' sets precision" in message

    def test_names_that_are_no_folder_names(self, write):
        assert "'../up-float64'" in self.refused(write(TEXT.replace("  cp2:", "  ../up:")))

    def test_an_axis_without_values(self, write):
        assert "has no values" in self.refused(write(TEXT.replace("[float64, float32]", "[]")))

    @pytest.mark.parametrize(
        ("text", "words"), [("", "a NoneType"), ("- a\n- b", "a list"), ("a: [1,\nb: 2", "valid YAML")]
    )
    def test_an_invalid_ablation_is_refused(self, write, text, words):
        assert words in self.refused(write(text))

    def test_a_file_that_is_not_there(self, tmp_path):
        assert "no such file" in self.refused(tmp_path / "none.yaml")

    BELOW = "base: {precision: bfloat16}\nreference: a\nconfigurations: {a: {seed: 7}, b: {layout: {cp: 2}}}\n"

    def test_below_float64_a_truth_is_required_with_a_working_example(self, write):
        message = self.refused(write(self.BELOW))
        assert "truth is missing\n  found: bfloat16 runs that are compared with a reference: b\n" in message
        truth, extra = message.rpartition("write ")[2].split(" and ")
        assert extra == """`extra: {exact: {"seed": 7, "precision": "float64"}}`"""
        planned = load_ablation(write("\n".join([self.BELOW, truth.strip("`"), extra.strip("`")]))).expand()
        assert [run.name for run in planned if run.truth == "exact"] == ["a", "b"]

    def test_a_float64_reference_that_is_there_is_offered_as_truth(self, write):
        message = self.refused(write(TEXT.replace("truth: one_rank-float64\n", "")))
        assert "write `truth: one_rank-float64`" in message

    def test_a_truth_that_is_not_exact_is_refused(self, write):
        message = self.refused(write(TEXT.replace("truth: one_rank-float64", "truth: one_rank-float32")))
        assert "truth 'one_rank-float32'\n  found: one_rank-float32 is not a float64 run" in message

    @pytest.mark.parametrize(
        ("changes", "found"),
        [
            ("precision: float64", "precision float64 against float32"),
            ("precision: bfloat16", "precision bfloat16 against float32"),
            ("steps: 2", "steps 2 against 1"),
            ("record: {gradients: norms}", "record.gradients norms against full"),
        ],
    )
    def test_a_run_that_cannot_be_compared_with_its_reference_is_refused(self, write, changes, found):
        message = self.refused(
            write(
                "reference: a\ntruth: t\nextra: {t: {precision: float64}}\n"
                f"configurations: {{a: {{}}, b: {{{changes}}}}}\n"
            )
        )
        assert f"compare 'b' with its reference 'a'\n  found: {found}\n" in message

    @pytest.mark.parametrize(
        ("changes", "found"),
        [("steps: 2", "steps 1 against 2"), ("record: {gradients: none}", "record.gradients full against none")],
    )
    def test_a_run_that_cannot_be_compared_with_the_truth_is_refused(self, write, changes, found):
        message = self.refused(
            write(
                f"reference: a\ntruth: t\nextra: {{t: {{precision: float64, {changes}}}}}\n"
                "configurations: {a: {}, b: {seed: 1}}\n"
            )
        )
        assert f"compare 'b' with its truth 't'\n  found: {found}\n" in message

    def test_gradients_that_neither_keeps(self, write):
        message = self.refused(
            write(
                "base: {precision: float64, record: {gradients: norms}}\nreference: a\n"
                "configurations: {a: {}, b: {seed: 1}}\n"
            )
        )
        assert "record.gradients norms against norms" in message

    def test_reproducible_runs_are_compared_bitwise_without_truth_or_gradients(self, write):
        text = (
            "base: {record: {gradients: none}, reproducible: {block_tokens: 8}}\nreference: a\n"
            "configurations: {a: {}, b: {layout: {cp: 2}}}\n"
        )
        planned = load_ablation(write(text)).expand()
        assert [(run.name, run.reference, run.truth) for run in planned] == [("a", "", ""), ("b", "a", "")]
        message = self.refused(write(text.replace("cp: 2}", "cp: 2}, record: {certificate: false}")))
        assert "record.gradients none against none" in message
        assert "steps 2 against 1" in self.refused(write(text.replace("cp: 2}", "cp: 2}, steps: 2")))

    @pytest.mark.parametrize(
        ("changes", "found"),
        [
            ("layout: {dp: 2}", "rows 2 (dp * data.micro_batches) against 1 (dp * data.micro_batches)"),
            ("data: {micro_batch_tokens: 64}", "rows of 64 tokens against 1 (dp * data.micro_batches)"),
            (
                "data: {balance: work}",
                "rows 1 (dp * data.micro_batches) with data.balance work against 1 (dp * data.micro_batches)",
            ),
            ("reproducible: {bits: 40}", "reproducible block_tokens=8 bits=40 against block_tokens=8"),
        ],
    )
    def test_a_run_that_cannot_match_the_bits_of_its_reference_is_refused(self, write, changes, found):
        message = self.refused(
            write(
                "base: {reproducible: {block_tokens: 8}}\nreference: a\n"
                f"configurations: {{a: {{}}, b: {{{changes}}}}}\n"
            )
        )
        assert f"compare 'b' with its reference 'a'\n  found: {found}" in message

    def test_rows_that_lie_otherwise_are_the_same_rows(self, write):
        planned = load_ablation(
            write(
                "base: {reproducible: {block_tokens: 8}, data: {micro_batches: 2}}\nreference: a\n"
                "configurations: {a: {}, b: {layout: {dp: 2}, data: {micro_batches: 1}}}\n"
            )
        )
        assert [run.name for run in planned.expand()] == ["a", "b"]

    def test_a_single_spec_may_record_anything(self, write):
        [run] = load_ablation(write("record: {gradients: none}", "mine.yaml")).expand()
        assert run.spec.record.gradients == "none"

    def test_an_unknown_fault_names_the_nearest(self, write):
        message = self.refused(write(TEXT.replace("[missing_cp_factor]", "[missing_cp_fcator]")))
        assert "1 of 5 runs cannot be used" in message
        assert "fault: fault 'missing_cp_fcator': unknown; did you mean 'missing_cp_factor'" in message
        assert len(message) < 1000

    def test_a_mistake_of_the_base_is_told_once(self, write):
        message = self.refused(write(TEXT.replace("base: {", "base: {lr: 0.1, ")))
        assert message.count("unknown key 'lr' (did you mean 'optimizer.learning_rate'?)") == 1
        assert "every run: unknown key" in message

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("configurations: {a: {}, b: {}}", "reference is missing(?s:.*)configurations a, b(?s:.*)`reference: a`"),
            ("reference: a", "configurations are missing(?s:.*)`configurations: {one_rank: {}"),
            (
                "steps: 4\nloss: {name: grpo}\nreference: a\nconfigurations: {a: {}}",
                "settings of a run outside `base`: loss, steps",
            ),
        ],
    )
    def test_a_missing_part_is_explained_without_the_file(self, write, text, words):
        message = self.refused(write(text))
        assert re.search(words, message), message
        assert "Field required" not in message
        assert len(message) < 700

    def test_clip_decisions_of_one_spec_itself(self, write):
        assert "mine -> mine" in self.refused(write("frozen_clip: mine", "mine.yaml"))

    def test_clip_decisions_of_a_run_that_is_not_there(self, write):
        message = self.refused(write(TEXT.replace("base: {", "base: {frozen_clip: one_rank-floaty, ")))
        assert "frozen_clip 'one_rank-floaty' does not exist" in message

    def test_clip_decisions_of_the_run_itself(self, write):
        message = self.refused(write(TEXT.replace("base: {", "base: {frozen_clip: one_rank-float64, ")))
        assert "one_rank-float64 -> one_rank-float64" in message


class TestSelection:
    def names(self, planned):
        return [run.name for run in planned]

    def test_includes_the_references_of_the_selected_runs(self, write):
        planned = load_ablation(write(TEXT)).expand()
        assert self.names(select(planned, ["cp2-float32"])) == ["one_rank-float64", "one_rank-float32", "cp2-float32"]

    def test_a_configuration_selects_all_its_runs(self, write):
        planned = load_ablation(write(TEXT)).expand()
        assert self.names(select(planned, ["cp2"])) == [
            "one_rank-float64",
            "one_rank-float32",
            "cp2-float64",
            "cp2-float32",
        ]

    def test_an_unknown_name_is_refused(self, write):
        with pytest.raises(SpecError, match="did you mean 'fault'"):
            select(load_ablation(write(TEXT)).expand(), ["fualt"])

    def test_includes_the_run_that_provides_clip_decisions(self):
        planned = AblationSpec(
            reference="a",
            base={"precision": "float64"},
            configurations={"a": {}, "b": {"seed": 2}, "other": {}, "c": {"frozen_clip": "b"}},
        ).expand()
        assert self.names(select(planned, ["c"])) == ["a", "b", "c"]

    def test_dependencies_are_transitive(self):
        """The chosen run has a reference, which takes the clip decisions of a third, which takes those of a fourth."""
        planned = AblationSpec(
            reference="a",
            base={"precision": "float64"},
            configurations={"a": {"frozen_clip": "b"}, "b": {"frozen_clip": "c"}, "c": {}, "d": {}, "other": {}},
        ).expand()
        assert self.names(select(planned, ["d"])) == ["a", "b", "c", "d"]


@pytest.mark.parametrize(("axis", "values"), [("loss.settings.low", [0.1, 0.2]), ("loss.engine", ["sum", "mean"])])
def test_settings_of_an_own_loss_are_an_axis_each_value_with_its_own_reference(axis, values):
    ablation = AblationSpec(
        base={"precision": "float64", "loss": {"name": "mine.py:loss"}},
        axes={axis: values},
        reference="a",
        configurations={"a": {}, "b": {"layout": {"cp": 2}}},
    )
    references = {run.name: run.reference for run in ablation.expand()}
    expected = {f"a-{value}": "" for value in values} | {f"b-{value}": f"a-{value}" for value in values}
    assert references == expected
