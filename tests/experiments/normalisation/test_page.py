"""The normalisation page: numbers by denominator, training by optimizer, complete, offline, and its saved data."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.normalisation import page as normalisation
from experiments.normalisation import thousand
from experiments.normalisation.page import (
    answer_of_batch,
    answer_of_training,
    denominator_table,
    norms_by_denominator,
    page,
    training,
    training_table,
    write_normalisation,
)
from tests.unit.report.test_page import Reader
from workbench.compare.comparison import Comparison, Configuration
from workbench.errors import RecordError
from workbench.launch.ablation import load_ablation
from workbench.reduction.denominators import DENOMINATORS
from workbench.specs.losses import with_compat
from workbench.specs.reading import parse_spec
from workbench.specs.run import RunSpec

FOLDER = Path(__file__).parents[3] / "experiments/normalisation"
M = 4


def configuration(name, losses, norms, *, state="succeeded", **settings):
    clip = settings.get("optimizer", {}).get("max_grad_norm")
    numbered = enumerate(zip(losses, norms, strict=True))
    steps = [
        {
            "step": step,
            "loss/total/sum": loss,
            "gradient/norm/global": norm,
            "documents/trained/sum": float(M),
            "gradient/clip/coefficient": 1.0 if clip is None or norm <= clip else clip / norm,
            "kl/old_policy/k3_mean": 0.01 * step,
        }
        for step, (loss, norm) in numbered
    ]
    return Configuration(
        name,
        RunSpec(steps=len(losses), **settings).model_dump(mode="json"),
        state=state,
        steps=steps if state == "succeeded" else [],
        run=f"runs/{name}",
    )


def one_batch():
    def run(denominator, norm, *, twice=False, **more):
        loss = {"denominator": denominator, "compat": {"normalize_by_documents": twice}} | more
        return configuration(
            f"one-{denominator}-{twice}",
            [-0.25],
            [norm / M if twice else norm],
            loss=loss,
            optimizer={"name": "sgd", "max_grad_norm": 0.3},
        )

    runs = [
        run("raw", 6.0),
        run("raw", 6.0, twice=True),
        run("token", 0.6),
        run("token", 0.6, twice=True),
        run("constant", 0.1, denominator_constant=8.0),
    ]
    return Comparison("one_batch", "What of <one> batch?", runs, {"versions": {"torch": "2.13.0"}})


def fifty_steps():
    def run(name, clip, twice, losses, norms):
        optimizer = {"name": name, "max_grad_norm": clip}
        return configuration(
            f"run-{name}-{clip}-{twice}",
            losses,
            norms,
            optimizer=optimizer,
            loss={"denominator": "document_sum", "compat": {"normalize_by_documents": twice}},
        )

    runs = [
        run("sgd", None, False, [-0.1, -0.3, -0.5], [8.0, 4.0, 2.0]),
        run("sgd", None, True, [-0.1, -0.2, -0.3], [2.0, 1.0, 0.5]),
        run("adamw", 0.3, False, [-0.1, -0.3, -0.5], [8.0, 4.0, 0.2]),
        run("adamw", 0.3, True, [-0.1, -0.29, -0.5], [0.2, 0.1, 0.05]),
    ]
    return Comparison("fifty_steps", "What of training?", runs, {"versions": {"torch": "2.13.0"}})


def thousand_documents():
    """Norms of three columns: 8 before, an M-th of it after, and with a spike in DeepSpeed's dtypes."""

    def run(twice, precision, norms):
        made = configuration(
            f"run-{twice}-{precision}",
            [-0.1] * len(norms),
            norms,
            optimizer={"max_grad_norm": 0.3},
            loss={"denominator": "document_sum", "compat": {"normalize_by_documents": twice}},
            precision=precision,
        )
        return replace(made, steps=[step | {"logprob/policy/mean": -0.5} for step in made.steps])

    runs = [
        run(False, "float32", [8.0, 8.0, 8.0]),
        run(True, "float32", [2.0, 2.0, 2.0]),
        run(True, "deepspeed_bf16", [2.1, 2.1, 9.0]),
    ]
    return Comparison("thousand_documents", "What of a thousand?", runs, {"versions": {"torch": "2.13.0"}})


def counted_twice():
    right = configuration("right", [-0.1, -0.2], [1.0, 1.0])
    wrong = replace(configuration("counted_by_every_rank", [-0.2, -0.4], [1.0, 1.0]), verdict="equal")
    return Comparison("counted_twice", "Twice?", [right, wrong], {"versions": {"torch": "2.13.0"}})


def failed(comparison):
    broken = configuration("broken", [0.0], [1.0], state="failed")
    return replace(comparison, configurations=[*comparison.configurations, replace(broken, why="out of <memory>")])


def parts():
    return one_batch(), failed(fifty_steps()), thousand_documents(), counted_twice()


@pytest.fixture(scope="module")
def text():
    return page(*parts())


# ---- one batch -----------------------------------------------------------------------------------------


def test_a_row_a_denominator_smallest_norm_first():
    result = denominator_table(one_batch())
    assert list(result.index) == ["constant", "token", "raw"]
    assert list(result["divisor"]) == ["M C", "T", "1"]
    assert list(result["norm"]) == [0.1, 0.6, 6.0]
    assert list(result["coefficient"]) == [1.0, 0.5, 0.3 / 6]
    assert list(result["norm_by_documents"]) == [None, 0.15, 1.5]
    assert list(result["coefficient_by_documents"]) == [None, 1.0, 0.3 / 1.5]


def test_every_denominator_has_its_divisor_in_letters_that_are_explained():
    assert set(normalisation.DIVISORS) == set(DENOMINATORS)
    for letter in {letter for divisor in normalisation.DIVISORS.values() for letter in divisor.split()} - {"1"}:
        assert re.search(rf"\b{letter} ", normalisation.LETTERS), letter


def test_the_figure_marks_each_norm_and_the_threshold():
    axes = norms_by_denominator(one_batch()).axes[0]
    marks = {
        (line.get_xdata()[0], line.get_ydata()[0]): line.get_markerfacecolor() == "#ffffff"
        for line in axes.lines
        if line.get_marker() == "o"
    }
    assert marks == {(0.1, 0): False, (0.6, 1): False, (0.15, 1): True, (6.0, 2): False, (1.5, 2): True}
    assert [label.get_text() for label in axes.get_yticklabels()] == ["constant", "token", "raw"]
    assert [line.get_xdata()[0] for line in axes.lines if list(line.get_xdata()) == [0.3, 0.3]] == [0.3]
    assert [text.get_text() for text in axes.texts if "·" in text.get_text()][:3] == [
        "1 · –",
        "0.500 · 1",
        "0.0500 · 0.200",
    ]


def test_the_summary_counts_gradients_on_each_side_of_the_threshold():
    text = answer_of_batch(one_batch())
    assert text.startswith("One batch of 4 documents has a gradient norm of 0.100 under constant and of 6.00 under raw")
    assert "a clip at 0.3 acts under 2 of 3 denominators, and leaves 0.050 of the gradient under raw" in text
    assert "once more it acts under 1 of 2" in text


# ---- training ------------------------------------------------------------------------------------------


def test_a_row_an_optimizer_and_a_line_a_weight_of_the_gradient():
    figure = training(fifty_steps())
    assert len(figure.axes) == 8
    assert [axes.get_title(loc="left") for axes in figure.axes[::4]] == ["SGD, no clipping", "AdamW, clipped at 0.3"]
    drawn = {line.get_label(): list(line.get_ydata()) for line in figure.axes[4].lines}
    assert drawn == {"loss ÷ M": [-0.1, -0.3, -0.5], "loss ÷ M, gradient ÷ M²": [-0.1, -0.29, -0.5]}
    norms, coefficients, moved = ([list(line.get_ydata()) for line in axes.lines] for axes in figure.axes[5:])
    assert norms == [[8.0, 4.0, 0.2], [0.2, 0.1, 0.05]]
    assert coefficients == [[0.3 / 8, 0.3 / 4, 1.0], [1.0, 1.0, 1.0]]
    assert moved == [[0.0, 0.01, 0.02]] * 2
    assert [axes.get_yscale() for axes in figure.axes[:4]] == ["linear", "log", "log", "linear"]


def test_the_table_has_the_result_of_each_run():
    table = training_table(fifty_steps())
    row = table.loc["AdamW, clipped at 0.3", "loss ÷ M"]
    assert (row["first_norm"], row["median_norm"], row["median_coefficient"]) == (8.0, 4.0, 0.3 / 4)
    assert (row["steps_clipped"], row["steps"], row["last_loss"], row["last_kl"]) == (2, 3, -0.5, 0.02)
    assert table.loc["SGD, no clipping", "loss ÷ M, gradient ÷ M²"]["steps_clipped"] == 0


def test_the_summary_states_the_distance_between_the_losses():
    text = answer_of_training(fifty_steps())
    assert "divided by M = 4 once more" in text
    assert text.endswith(": 50 % (SGD, no clipping), 2.5 % (AdamW, clipped at 0.3).")


def test_other_denominators_and_single_runs_are_labelled():
    runs = [
        configuration("a", [0.1], [1.0], loss={"denominator": "token"}),
        configuration("b", [0.1], [1.0], loss={"denominator": "token", "compat": {"normalize_by_documents": True}}),
    ]
    table = training_table(Comparison("x", "?", runs))
    assert list(table.index) == [
        ("AdamW, no clipping", "denominator token"),
        ("AdamW, no clipping", "denominator token, gradient ÷ M once more"),
    ]
    assert "No two runs" in answer_of_training(Comparison("x", "?", runs[:1]))


# ---- the page ------------------------------------------------------------------------------------------


def test_the_page_is_whole_offline_and_well_formed(text):
    read = Reader(text)
    assert (read.crossed, read.open) == ([], [])
    assert not re.search(r"https?:|//[a-z]|url\((?!#)|@import|<image|data:", text)
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in read.tags}
    ids = [attributes["id"] for _, attributes in read.tags if "id" in attributes]
    assert len(set(ids)) == len(ids)
    assert all(
        attributes[key][1:] in ids for _, attributes in read.tags for key in ("href", "xlink:href") if key in attributes
    )


def test_the_page_escapes_names_and_lists_failed_runs(text):
    assert "What of &lt;one&gt; batch?" in text
    assert "Failed, and not shown: broken (out of &lt;memory&gt;)" in text
    assert (
        "Not run on this rollout dataset: document, document_sum, prompt_group, rollout, group_length, local_token"
        in text
    )


def test_the_page_has_both_summaries_figures_and_tables(text):
    assert answer_of_batch(one_batch()) in text
    assert answer_of_training(fifty_steps()) in text
    assert [caption in text for caption in ('id="norms-by-denominator-caption"', 'id="training-caption"')] == [True] * 2
    assert '<th scope="row">AdamW, clipped at 0.3; loss ÷ M</th><td class="number">8.00</td>' in text


def test_the_page_is_reproducible_from_the_saved_records(text, tmp_path):
    for comparison in parts():
        comparison.save(tmp_path / comparison.experiment / "comparison.json")
    assert normalisation.main([str(tmp_path)]) == tmp_path / "report.html"
    assert (tmp_path / "report.html").read_text(encoding="utf8") == text


def test_a_comparison_in_which_nothing_succeeded_is_refused():
    with pytest.raises(RecordError, match="no run that succeeded"):
        denominator_table(Comparison("one_batch", "?", failed(one_batch()).configurations[-1:]))
    with pytest.raises(RecordError, match=re.escape("comparison.json")):
        write_normalisation(FOLDER / "nowhere")


# ---- a thousand documents ----------------------------------------------------------------------------------------


def test_columns_are_ours_and_those_of_the_pull_request():
    lines = {line[0]: line[1:] for line in thousand.rows(thousand_documents())}
    assert lines["first gradient norm"] == ["8.00", "2.00", "2.10", "141", "0.135", "0.145"]
    assert lines["first clip coefficient"][:3] == ["0.0375", "0.150", "0.143"]
    assert lines["spikes, norm above 3 medians"][:3] == ["0 of 3", "0 of 3", "1 of 3"]
    assert "4.000 times less" in thousand.answer(thousand_documents())


def test_a_missing_column_is_named():
    two = thousand_documents()
    with pytest.raises(RecordError, match="no successful run for DeepSpeed's"):
        thousand.rows(replace(two, configurations=two.configurations[:2]))


def test_a_loss_that_is_counted_twice_has_the_same_gradient():
    shown = thousand.counted_answer(counted_twice())
    assert "0.400 instead of \N{MINUS SIGN}0.200 in step 1, 2.000 times as much" in shown
    assert "the gradient norm is 1.00 in both, and the verdict on the gradients is equal" in shown


def test_the_saved_norms_differ_by_the_documents_of_the_step():
    documents, counted = normalisation.load_parts(FOLDER)[2:]
    before, after, deepspeed = (c.steps[0] for c in thousand.runs_of(documents).values())
    assert before["documents/trained/sum"] == 1024
    assert before[thousand.NORM] / after[thousand.NORM] == pytest.approx(1024, rel=1e-3)
    assert deepspeed[thousand.NORM] == pytest.approx(after[thousand.NORM], rel=0.2)
    assert before[thousand.COEFFICIENT] < 0.3 < after[thousand.COEFFICIENT] == 1
    assert "2.000 times as much" in thousand.counted_answer(counted)


# ---- saved data ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [part for part in normalisation.PARTS if part != "counted_twice"])
def test_nothing_is_judged_and_saved_runs_have_the_settings_of_their_file(part):
    planned = load_ablation(FOLDER / f"{part}.yaml").expand()
    assert {plan.reference for plan in planned} == {""}
    saved = Comparison.load(FOLDER / part / "comparison.json")
    settings = {c.name: c.settings | {"loss": with_compat(c.settings["loss"])} for c in saved.configurations}
    ran = {name: parse_spec(RunSpec, given, where=name) for name, given in settings.items()}
    assert ran == {plan.name: plan.spec for plan in planned}
    assert {(c.state, len(c.steps)) for c in saved.configurations} == {("succeeded", planned[0].spec.steps)}


def test_one_batch_has_every_denominator_that_its_rollouts_allow():
    result = denominator_table(Comparison.load(FOLDER / "one_batch/comparison.json"))
    assert set(DENOMINATORS) - set(result.index) == {"rollout"}, "the recording has no rollout ids"
    assert list(result["norm"] / result["norm_by_documents"]) == pytest.approx([72] * len(result), rel=1e-4)
    assert result.loc["document_sum", "norm"] == pytest.approx(64 * result.loc["constant", "norm"], rel=1e-4)


def test_the_saved_page_is_the_page_of_the_saved_runs():
    assert (FOLDER / "report.html").read_text(encoding="utf8") == page(*normalisation.load_parts(FOLDER))


def test_nothing_saved_names_a_machine():
    saved = [FOLDER / "report.html", *(FOLDER / part / "comparison.json" for part in normalisation.PARTS)]
    for path in saved:
        assert not re.findall(r"(?<![<\w.])/(?:home|root|tmp|work|opt|Users)/[\w./-]*", path.read_text(encoding="utf8"))
