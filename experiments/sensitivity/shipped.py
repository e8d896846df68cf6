"""Known bugs that the comparisons of this repository see: its ablations, notebooks, and datasets.

``python -m experiments.sensitivity.shipped`` plants every admissible fault in each of them and writes ``shipped.json``;
names measure some again, and ``--page FILE`` writes the page of the record. The ablation `layout_parity`, the shipped
rollout dataset and the generated one are in the record of `workbench bench sensitivity`.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from experiments.pages import provenance as provenance_section
from experiments.sensitivity.drawn import packed, unpacked
from experiments.sensitivity.predictions import predict
from workbench.atomic import from_json, to_json, write_whole
from workbench.experiment import Experiment
from workbench.faults import fault_names, load_fault
from workbench.mutation_score import sensitivity
from workbench.records.provenance import project_root, provenance
from workbench.report.markup import Markup, join, table, tag
from workbench.report.page import document
from workbench.sensitivity import layout_needs
from workbench.sensitivity.changes import DATA
from workbench.sensitivity.needs import GRADIENT
from workbench.sensitivity.needs import NEEDS as NEEDS_OF_FAULTS

FOLDER = Path(__file__).parent
RECORD = FOLDER / "shipped.json"

MEASURED: Mapping[str, str] = {
    "experiments/expert_layouts/ablation.yaml": "",
    "experiments/adapter_layouts/ablation.yaml": "",
    "experiments/five_dimensions/ablation.yaml": "",
    "notebooks/01_quickstart.ipynb": "two_ranks",
    "notebooks/03_where_the_tokens_go.ipynb": "ABLATION",
    "notebooks/05_logprobs_without_logits.ipynb": "ABLATION",
    "notebooks/08_what_precision_costs.ipynb": "ABLATION",
    "notebooks/12_what_a_check_can_see.ipynb": "ABLATION",
}
"""File -> the name that a notebook gives its ablation."""

NOT_MEASURED: Mapping[str, str] = {
    "experiments/layout_parity_h200/ablation.yaml": "the settings of layout_parity, with fewer of its layouts, on GPUs",
    "experiments/online/ablation.yaml": "samples its own documents: a fault would change them",
    "experiments/online_layouts/ablation.yaml": "samples its own documents: a fault would change them",
    "experiments/normalisation": "compares denominators and a fault with its cause, not two runs that should agree",
    "experiments/fused_ab": "samples its own documents: a fault would change them",
    "experiments/ratio_at_step_zero": "samples its own documents: a fault would change them",
    "experiments/gpu_layouts": "a benchmark on GPUs, with gradients against a float64 truth",
    "experiments/reproducible": "a benchmark on GPUs, whose layouts give the same bits",
    "notebooks/02_losses_side_by_side.ipynb": "compares losses that differ",
    "notebooks/04_reduction_is_where_it_breaks.ipynb": "prove: invariants on drawn documents",
    "notebooks/06_two_layouts_one_model.ipynb": "an encoder and its bridge, whose faults have a record of their own",
    "notebooks/07_a_small_rl_run.ipynb": "samples its own documents: a fault would change them",
    "notebooks/09_five_dimensions.ipynb": "the layouts of five_dimensions, a step at a time",
    "notebooks/10_another_systems_step.ipynb": "one step of another system",
    "notebooks/11_trainer_and_sampler.ipynb": "attributes a gap between trainer and sampler",
}
"""Other ablations and notebooks -> the reason why no fault is planted in them."""


def ablation_of(name: str, project: Path) -> Path | dict[str, Any]:
    """The ablation of a file: the file, or the literal that a notebook assigns to a name."""
    path = project / name
    if path.suffix != ".ipynb":
        return path
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code" or f"{MEASURED[name]} = " not in source:
            continue
        for node in ast.parse(source).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == MEASURED[name]:
                value = ast.literal_eval(node.value)
                settings: dict[str, Any] = yaml.safe_load(value) if isinstance(value, str) else value
                return settings
    raise LookupError(f"{name} assigns no literal to {MEASURED[name]}")


def measured(name: str, project: Path) -> dict[str, Any]:
    """Measure every admissible fault in the runs of one comparison; those in float64, if there are any."""
    score = sensitivity(ablation_of(name, project), project=project, remedies=False)
    killed, admissible = score.of_gradients
    return {
        "name": name,
        "runs": len(score.configurations),
        "left_out": len(score.left_out),
        "seconds": score.seconds,
        "killed": score.killed,
        "admissible": len(score.results),
        "gradient_killed": killed,
        "gradient_admissible": admissible,
        "disagreements": [result.fault for result in score.disagreements],
        "results": {
            result.fault: {"missing": list(result.missing), "killed": result.killed, "verdict": result.verdict}
            for result in score.results
        },
    }


def predicted(name: str, project: Path) -> dict[str, Any]:
    """Predict every admissible fault of one comparison from its clean runs, and measure none."""
    experiment = Experiment(ablation_of(name, project), project=project)
    names = [name for name in fault_names() if (own := load_fault(name)).changes_numbers or own.changes_update]
    runs = [plan.name for plan in experiment.planned if plan.spec.in_float64 and not plan.spec.faults]
    missing = predict(experiment, runs, names)
    shown = [name for name, needs in missing.items() if not needs]
    gradients = [name for name in missing if load_fault(name).changes_gradient]
    return {
        "name": name,
        "predicted": True,
        "runs": len(runs),
        "killed": len(shown),
        "admissible": len(missing),
        "gradient_killed": sum(name in shown for name in gradients),
        "gradient_admissible": len(gradients),
        "disagreements": [],
        "results": {
            name: {"missing": needs, "killed": not needs, "verdict": "equal" if needs else "different"}
            for name, needs in missing.items()
        },
    }


def load_record() -> dict[str, Any]:
    """Return the saved record, with the results as `measured` has them."""
    return unpacked(from_json(RECORD.read_text()))


KINDS = ("data", "settings", "a gradient", "nothing")
"""What a survivor lacks: properties of documents alone, which another dataset would have; another loss, layout or
optimizer; a gradient, as it changes reported numbers only; nothing, if the prediction was wrong."""


def kind_of(missing: Sequence[str]) -> str:
    """Return the kind of what a survivor lacks."""
    if not missing:
        return "nothing"
    if {GRADIENT.missing, layout_needs.NO_EVIDENCE.missing} & {*missing}:
        return "a gradient"
    return "data" if all(reason in NEEDS and NEEDS[reason].change in DATA for reason in missing) else "settings"


NEEDS = {need.missing: need for needs in NEEDS_OF_FAULTS.values() for need in needs}


def entries(record: Mapping[str, Any], saved: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All comparisons: those of the record of `workbench bench sensitivity` first, then those of the record."""
    own = saved["float64"]
    results = {result["fault"]: result for result in own["results"]}
    generated = {
        name: {"missing": [], "killed": result["generated"], "verdict": ""}
        for name, result in results.items()
        if result["generated"] is not None
    }
    return [
        {"name": "experiments/layout_parity/ablation.yaml", "runs": len(own["configurations"]), "results": results},
        {"name": "the same on the generated dataset", "runs": len(own["configurations"]), "results": generated},
        *record["ablations"],
    ]


def rows(record: Mapping[str, Any], saved: Mapping[str, Any]) -> list[list[str]]:
    """Rows of the table: killed faults of the admissible ones, and the number of survivors by what they lack."""
    lines = []
    for entry in entries(record, saved):
        results, only = entry["results"], ", predicted" if entry.get("predicted") else ""
        gradients = {name: result for name, result in results.items() if load_fault(name).changes_gradient}
        counts = Counter(kind_of(result["missing"]) for result in results.values() if not result["killed"])
        lines.append(
            [
                f"`{entry['name']}`" if "/" in entry["name"] else entry["name"],
                _share(gradients) + only,
                _share(results) + only,
                *(str(counts[kind] or "") for kind in KINDS),
            ]
        )
    return lines


def _share(results: Mapping[str, Mapping[str, Any]]) -> str:
    return f"{sum(result['killed'] for result in results.values())} of {len(results)}"


HEADS = ("comparison", "gradients", "all faults", *(f"lacks {kind}" for kind in KINDS))


def page(record: Mapping[str, Any], saved: Mapping[str, Any]) -> str:
    """Render the page: the table, then every fault in every comparison, with what a survivor lacks there."""
    masthead = tag(
        "header",
        tag("p", "workbench report · ", tag("b", "mutation score"), class_="eyebrow"),
        tag("h1", "Which known bugs do the comparisons of this repository see?"),
    )
    measured = entries(record, saved)
    missing = {reason for entry in measured for result in entry["results"].values() for reason in result["missing"]}
    reasons = sorted(missing)
    sections = [
        ("Comparisons", table(list(HEADS), rows(record, saved), numbers=tuple(range(1, len(HEADS))))),
        ("Faults", join([tag("p", LEGEND), faults(measured, reasons)])),
        ("What survivors lack", table(["number", "missing"], [[str(n), why] for n, why in enumerate(reasons)])),
        ("Not measured", table(["file", "why"], [[tag("code", n), why] for n, why in NOT_MEASURED.items()])),
        ("Provenance", provenance_section(record)),
    ]
    return document("sensitivity", [masthead], sections)


REJECTED = "✓"
LEGEND = f"{REJECTED} is rejected; numbers are what a survivor lacks, below; empty: no run calls what it replaces."


def faults(measured: Sequence[Mapping[str, Any]], reasons: Sequence[str]) -> Markup:
    """Table of faults by comparison: rejected, or the numbers of what a survivor lacks; empty where not admissible."""

    def cell(result: Mapping[str, Any] | None) -> str:
        if result is None:
            return ""
        numbers = ", ".join(str(reasons.index(reason)) for reason in result["missing"])
        return REJECTED if result["killed"] else numbers or "not predicted"

    names = sorted({name for entry in measured for name in entry["results"]})
    lines = [[tag("code", name), *(cell(entry["results"].get(name)) for entry in measured)] for name in names]
    return table(["fault", *(_short(entry["name"]) for entry in measured)], lines)


def _short(name: str) -> str:
    """Folder of an ablation, number of a notebook."""
    path = Path(name)
    return path.parent.name if path.suffix == ".yaml" else f"notebook {path.stem[:2]}" if path.suffix else name


def main(arguments: list[str] | None = None) -> int:
    """Measure all comparisons, or the named ones, and write the record and its page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="files to measure again; all without any")
    parser.add_argument("--predict", action="store_true", help="predict the named files, and measure none of them")
    parser.add_argument("--page", type=Path, help="file of the page of the record; measure nothing")
    chosen = parser.parse_args(arguments)
    project = project_root()
    if chosen.page is None:
        kept = {entry["name"]: entry for entry in load_record()["ablations"]} if RECORD.exists() else {}
        for name in chosen.names or MEASURED:
            kept[name] = predicted(name, project) if chosen.predict else measured(name, project)
            print(f"{name}: {kept[name]['killed']} of {kept[name]['admissible']}", flush=True)
            record = {
                "benchmark": "shipped comparisons",
                "command": "python -m experiments.sensitivity.shipped",
                "device": "cpu, simulated ranks",
                "ablations": [kept[each] for each in MEASURED if each in kept],
                "provenance": provenance(project),
            }
            write_whole(RECORD, to_json(packed(record)))
    record = load_record()
    if chosen.page is not None:
        write_whole(chosen.page, page(record, from_json((FOLDER / "sensitivity.json").read_text())).encode())
    return int(any(entry["disagreements"] for entry in record["ablations"]))


if __name__ == "__main__":
    sys.exit(main())
