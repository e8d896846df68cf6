"""Saved records under experiments/ are complete, small, offline, and agree with the code."""

import re
from pathlib import Path

import pytest

from experiments.encoder_bridge import page_bridge as bridge
from experiments.fused_ab import page as fused_ab
from experiments.gpu_layouts import page as gpu_layouts
from experiments.head.page import page
from experiments.ratio_at_step_zero import page as ratio_at_step_zero
from experiments.reproducible import page as reproducible
from workbench.atomic import from_json
from workbench.compare.comparison import Comparison
from workbench.launch.ablation import load_ablation
from workbench.report import figures, style
from workbench.report.numbers import significant
from workbench.report.online import online_answer
from workbench.report.page import write_report
from workbench.specs.losses import with_compat
from workbench.specs.reading import parse_spec
from workbench.specs.run import RunSpec

PROJECT = Path(__file__).parents[2]
EXPERIMENTS = PROJECT / "experiments"
BENCHMARKS = PROJECT / "docs/benchmarks.md"
GUIDES = PROJECT / "docs/guides"
SAVED = sorted(path.parent for path in EXPERIMENTS.glob("*/comparison.json"))
MEASURED = [
    EXPERIMENTS / name
    for name in (
        "head",
        "gpu_layouts",
        "step",
        "precision",
        "reproducible",
        "encoder_bridge",
        "benchmarks",
        "fused_ab",
        "ratio_at_step_zero",
        "sensitivity",
        "engine_matrix",
        "attribution",
        "mismatch_lab",
    )
]
ONLINE = [EXPERIMENTS / "fused_ab" / name for name in fused_ab.ABLATIONS] + [
    EXPERIMENTS / "ratio_at_step_zero" / name for name in ratio_at_step_zero.ABLATIONS
]
UNTRACKED = {"runs", "policy", "__pycache__"}


def spec_of(configuration):
    """Today's spec of a recorded configuration; a setting that is newer than the record has its default."""
    settings = configuration.settings | {"loss": with_compat(configuration.settings["loss"])}
    return parse_spec(RunSpec, settings, where=configuration.name)


def tracked(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return [path for path in files if UNTRACKED.isdisjoint(path.relative_to(EXPERIMENTS).parts)]


def test_experiments_stay_small():
    """Records, pages and notebooks of all experiments, in a clone that should take seconds."""
    assert sum(path.stat().st_size for path in tracked(EXPERIMENTS)) < 24 * 2**20


@pytest.mark.parametrize("folder", SAVED, ids=lambda folder: folder.name)
def test_the_saved_page_is_the_page_of_the_saved_comparison(folder, tmp_path):
    written = write_report(Comparison.load(folder / "comparison.json"), tmp_path / "report.html")
    assert written.read_bytes() == (folder / "report.html").read_bytes()


def test_the_figure_of_the_readme_is_that_of_the_saved_comparison():
    """`make report` draws it again, as does `workbench report experiments/layout_parity`."""
    folder = EXPERIMENTS / "layout_parity"
    figure = figures.verdicts(Comparison.load(folder / "comparison.json"))
    assert style.svg_text(figure, outlines=True) == (folder / "verdicts.svg").read_text()


@pytest.mark.parametrize("folder", [*SAVED, *MEASURED], ids=lambda folder: folder.name)
def test_nothing_saved_names_a_machine(folder):
    for path in tracked(folder):
        matches = re.findall(r"/(?:home|root|tmp|work|opt)/[\w./-]*", path.read_text())
        assert matches == [], path


@pytest.mark.parametrize("folder", [f for f in SAVED if f.name.startswith("layout_parity")], ids=lambda f: f.name)
def test_every_right_layout_agrees_and_every_fault_differs_with_its_factor(folder):
    comparison = Comparison.load(folder / "comparison.json")
    planned = {plan.name: plan for plan in load_ablation(folder / "ablation.yaml").expand()}
    assert [c.name for c in comparison.configurations] == list(planned)
    for c in comparison.configurations:
        ran = spec_of(c)
        assert ran == planned[c.name].spec, f"{c.name} was run with other settings"
        right = {"float64": "equal", "float32": "within budget"}[c.settings["precision"]]
        expected = "different" if c.settings["faults"] else right if c.against else "reference"
        assert c.verdict == expected, c.name
    missing = comparison["fault_missing_cp_factor"]
    assert missing.factor == pytest.approx(0.5, abs=1e-9)
    assert missing.factor_meaning == "1 / cp"
    assert 1.9 < comparison["fault_local_denominator"].factor < 2.1
    assert comparison["fault_shift_after_shard"].first_step == 0


def test_the_saved_page_of_the_head_is_that_of_its_records():
    records = [from_json((EXPERIMENTS / "head" / name).read_text()) for name in ("head.json", "head_parallel.json")]
    assert page(*records) == (EXPERIMENTS / "head/report.html").read_text()


def test_docs_match_the_record_of_the_head():
    record = from_json((EXPERIMENTS / "head/head.json").read_text())
    lines = {line.split("|")[1].strip(): line for line in BENCHMARKS.read_text().splitlines() if line.startswith("| `")}
    for text, name in (
        ("`fused_loss`, token-level", "fused_loss"),
        ("`fused_loss`, GSPO", "fused_loss GSPO"),
        ("`token_logprobs`, all kept", "token_logprobs, room"),
        ("`token_logprobs`, nothing kept", "token_logprobs"),
    ):
        results = [work["forward_backward"]["contenders"][name] for work in record["workloads"].values()]
        cells = [f"{entry['ratio']:.2f} ({entry['extra_gib']:.1f})" for entry in results]
        assert [cell.strip() for cell in lines[text].split("|")[2:-1]] == cells
    held = sum(bar["holds"] for bar in record["bars"].values())
    for text in (BENCHMARKS.read_text(), (GUIDES / "log-probabilities.md").read_text()):
        assert f"{held} of {len(record['bars'])} bars hold." in text
    ratios = [
        work["forward_backward"]["contenders"][name]["ratio"]
        for work in record["workloads"].values()
        for name in ("fused_loss", "fused_loss GSPO")
    ]
    guide = (GUIDES / "log-probabilities.md").read_text()
    assert f"takes {min(ratios):.2f} to {max(ratios):.2f} times three plain GEMMs" in guide


def test_the_saved_page_of_layouts_on_gpus_is_that_of_its_record():
    record = from_json((EXPERIMENTS / "gpu_layouts/layouts.json").read_text())
    assert gpu_layouts.page(record) == (EXPERIMENTS / "gpu_layouts/report.html").read_text()


def test_docs_match_the_record_of_gpu_layouts():
    record = from_json((EXPERIMENTS / "gpu_layouts/layouts.json").read_text())
    page = BENCHMARKS.read_text().partition("\n## Layouts on GPUs\n")[2].partition("\n## ")[0]
    measured = record["workloads"]["bfloat16_32k"]
    lines = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+)k \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert {name for name, *_ in lines} >= {"one_rank", "dp4", "cp4_zigzag", "cp4_ring", "tp4_sequence_parallel"}
    for name, *cells in lines:
        result = measured[name]
        assert cells == [
            f"{result['step_ms']:.0f}",
            f"{result['tokens_per_second'] / 1e3:.0f}",
            f"{result['efficiency']:.2f}",
            f"{result['peak_gib']:.1f}",
            f"{result['parity']['distance_in_one_ranks']:.2f}",
        ], name
    entries = [result for workload in record["workloads"].values() for result in workload.values()]
    within = sum(result["parity"]["within"] for result in entries if "parity" in result)
    assert f"All {within} layouts measured" in page
    assert f"all {within} layouts measured" in (GUIDES / "layouts.md").read_text()
    assert within == sum("parity" in result for result in entries)
    assert f"{sum('left_out' in result for result in entries)} of float32 were not reached" in " ".join(page.split())


def test_docs_match_the_record_of_the_reproducible_mode():
    record = from_json((EXPERIMENTS / "reproducible/reproducible.json").read_text())
    assert reproducible.page(record) == (EXPERIMENTS / "reproducible/report.html").read_text()
    guide, tables = " ".join((GUIDES / "reproducible-runs.md").read_text().split()), BENCHMARKS.read_text()
    entries = {
        (workload, layout): result
        for machine in record["machines"]
        for workload, layouts in machine["workloads"].items()
        for layout, result in layouts.items()
    }
    same = [result["same"]["reproducible"] for result in entries.values() if "same" in result]
    assert all(result["equal"] == result["tensors"] > 200 for result in same)
    assert f"all {len(same)} of {len(same)} runs" in guide
    lines = re.findall(r"^\| (hidden_\d+) \| (\w+) \| (\d+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", tables, re.MULTILINE)
    timed = {key: result["timed"] for key, result in entries.items() if "timed" in result}
    assert [(workload, layout) for workload, layout, *_ in lines] == list(timed)
    for workload, layout, *cells in lines:
        fast, exact = (timed[workload, layout][mode] for mode in ("fast", "reproducible"))
        assert cells == [
            f"{fast['step_ms']:.0f}",
            f"{exact['step_ms']:.0f}",
            f"{exact['step_ms'] / fast['step_ms']:.2f}",
            f"{exact['peak_gib'] / fast['peak_gib']:.2f}",
        ]
    for text, key in (("takes {} to {} times the time", "step_ms"), ("and {} to {} times the memory", "peak_gib")):
        costs = [entry["reproducible"][key] / entry["fast"][key] for entry in timed.values()]
        assert text.format(f"{min(costs):.2f}", f"{max(costs):.2f}") in " ".join(guide.split()).replace(
            "of the ordinary one ", ""
        )
    missed = [name for name, bar in record["bars"].items() if not bar["holds"]]
    assert all("cp4" in name and "memory" in name for name in missed)


@pytest.mark.parametrize("folder", ["encoder_bridge", "encoder_bridge/h200"])
def test_the_saved_page_of_bridges_is_that_of_its_record(folder):
    record = from_json((EXPERIMENTS / folder / "bridge.json").read_text())
    assert record["bars"]["exact"]["holds"]
    assert bridge.page(record) == (EXPERIMENTS / folder / "bridge.html").read_text()


def test_docs_match_the_record_of_bridges():
    record = from_json((EXPERIMENTS / "encoder_bridge/h200/bridge.json").read_text())
    lines = re.findall(
        r"^\| ([\w-]+) \| ([\w ,-]+) \| ([\d.]+) \| (\d+) \| ([\d.]+) \| (\d+) \|$",
        BENCHMARKS.read_text(),
        re.MULTILINE,
    )
    assert len(lines) == 9
    for name, way, *cells in lines:
        result = record["bridges"][name]["ways"][way]
        assert cells == [
            f"{result['forward_ms']:.2f}",
            f"{result['forward_bytes'] / 2**20:.0f}",
            f"{result['backward_ms']:.2f}",
            f"{result['backward_bytes'] / 2**20:.0f}",
        ]


def test_docs_match_the_record_of_verify():
    record = from_json((EXPERIMENTS / "benchmarks/verify.json").read_text())
    runs = [run for name, run in record["runs"].items() if name.startswith(("torch", "ours"))]
    assert len(runs) == 4
    most = max(run["over_one_rank"] for run in runs)
    assert f"at most {most:.2f} times as far" in " ".join((GUIDES / "your-trainer.md").read_text().split())
    assert all(run["bytes"][kind]["growth"] == 0 for run in runs for kind in ("allocated", "reserved"))
    assert all(bar["holds"] for bar in record["bars"].values())


@pytest.mark.parametrize("folder", ONLINE, ids=lambda folder: folder.name)
def test_the_online_record_matches_its_ablation_file(folder):
    comparison = Comparison.load(folder / "comparison.json")
    planned = {plan.name: plan.spec for plan in load_ablation(folder.with_suffix(".yaml")).expand()}
    assert {c.name: spec_of(c) for c in comparison.configurations} == planned
    assert {(c.state, c.device) for c in comparison.configurations} == {("succeeded", "cuda")}


def test_online_runs_are_the_same_in_every_layout_on_gpus():
    comparison = Comparison.load(EXPERIMENTS / "online_layouts/comparison.json")
    planned = load_ablation(EXPERIMENTS / "online_layouts/ablation.yaml").expand()
    assert {c.name: spec_of(c) for c in comparison.configurations} == {plan.name: plan.spec for plan in planned}
    assert {c.device for c in comparison.configurations} == {"cuda"}
    verdicts = {c.name: c.verdict for c in comparison.configurations}
    assert verdicts.pop("one_rank") == "reference"
    assert {name for name, verdict in verdicts.items() if verdict != "equal"} == {
        "fault_missing_cp_factor",
        "other_seed",
    }
    assert len(verdicts) == 10
    assert comparison["fault_missing_cp_factor"].factor_meaning == "1 / cp"
    assert comparison["other_seed"].why == "step 0: it trains on other tokens than the reference"
    assert {len(c.whole_gradient) for c in comparison.configurations if c.verdict == "equal"} == {4}


def test_the_saved_page_of_the_fused_head_is_that_of_its_records():
    records = fused_ab.Records.load(EXPERIMENTS / "fused_ab")
    assert fused_ab.page(records) == (EXPERIMENTS / "fused_ab/report.html").read_text()
    assert records.policy["parameters_beside_embedding"] > 30e6
    assert fused_ab.holds(records.step_one)
    assert "All runs drew the same completions" in fused_ab.page(records)
    for one, fifty in (("plain-float32", "run-False-0"), ("fused-float32", "run-True-0")):  # the same step, bit for bit
        alone, first = records.step_one[one].steps[0], records.fifty_steps[fifty].steps[0]
        keys = (fused_ab.LOSS, fused_ab.NORM, fused_ab.REWARD)
        assert [first[key] for key in keys] == [alone[key] for key in keys]


def test_the_saved_page_of_the_first_ratio_is_that_of_its_records():
    records = ratio_at_step_zero.Records.load(EXPERIMENTS / "ratio_at_step_zero")
    assert ratio_at_step_zero.page(records) == (EXPERIMENTS / "ratio_at_step_zero/report.html").read_text()
    drew = ratio_at_step_zero.ratios(records).groupby("sampler")["answers"].nunique()
    assert drew.to_dict() == {"bfloat16": 1, "float32": 1}


def test_the_figure_of_the_readme_is_saved():
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", (PROJECT / "README.md").read_text())
    assert pictures
    for picture in pictures:
        assert (PROJECT / picture).is_file(), picture


def test_docs_match_the_records_of_the_fused_head():
    records = fused_ab.Records.load(EXPERIMENTS / "fused_ab")
    page = " ".join(BENCHMARKS.read_text().split())
    guide = " ".join((GUIDES / "online-rl.md").read_text().split())
    curves, step = fused_ab.training_table(records), fused_ab.step_table(records.step_one)
    for key, title in fused_ab.METRICS.items():
        cells = [significant(curves.loc[key, name]) for name in ("first", "last", "fused_last")]
        cells += [significant(curves.loc[key, name], 2) for name in ("fused_plain", "rounding", "seeds")]
        assert f"| {title} | {' | '.join(cells)} |" in page
    for precision in ("float64", "float32"):
        text, row = "{} and {} away (allowed {} and {})", step.loc[f"fused-{precision}"]
        names = ("loss_off", "norm_off", "loss_budget", "norm_budget")
        assert text.format(*(significant(row[name], 2) for name in names)) in page
    times = curves["fused_plain"] / curves["rounding"]
    assert f"lie {significant(times.min(), 2)} to {significant(times.max(), 2)} times as far apart" in page
    assert f"lie {significant(times.min(), 2)} to {significant(times.max(), 2)} times as far apart" in guide
    million = records.policy["parameters_beside_embedding"] / 1e6
    assert f"{million:.1f} million parameters beside its embedding" in page
    assert f"until {records.policy['success_rate']:.0%} of its answers are right" in page


def test_docs_match_the_records_of_the_first_ratio():
    result = ratio_at_step_zero.ratios(ratio_at_step_zero.Records.load(EXPERIMENTS / "ratio_at_step_zero"))
    made = {
        f"| {row['sampler']} | {row['trainer']} | {row['head']} | {row['temperature']:g} "
        f"| {significant(row['mean_distance'], 2)} | {significant(row['most'], 2)} "
        f"| {significant(100 * row['outside'], 2)} % |"
        for _, row in result.iterrows()
    }
    lines = re.findall(r"^\| b?float\d+ \| b?float\d+ \| .*% \|$", BENCHMARKS.read_text(), re.MULTILINE)
    assert made == set(lines)


def test_docs_match_the_record_of_the_small_run():
    comparison = Comparison.load(EXPERIMENTS / "online/comparison.json")
    first, last = re.search(r"Right answers rise from (\d+) to (\d+) %", (GUIDES / "online-rl.md").read_text()).groups()
    text = f"{first} % of the completions right in the first tenth of the steps, {last} % in the last"
    assert text in online_answer(comparison)
    planned = {plan.name: plan.spec for plan in load_ablation(EXPERIMENTS / "online/ablation.yaml").expand()}
    assert {c.name: spec_of(c) for c in comparison.configurations} == planned
