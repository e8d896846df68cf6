"""Train a policy with the plain and with the fused head, and write report.html.

python experiments/fused_ab/warm_up.py                  first: the policy, about a minute on a GPU
python experiments/fused_ab/report.py                   then the runs, their records, and the page
python experiments/fused_ab/report.py --measure         runs and records only, for the machine with the GPU
python experiments/fused_ab/report.py --page            the page only, from the records
python experiments/fused_ab/report.py --dry-run FOLDER  everything in FOLDER: a few steps of a tiny policy
"""

import argparse
from pathlib import Path

import yaml

import workbench as wb
from experiments.fused_ab.page import ABLATIONS, write_fused_ab, write_sampled
from workbench.specs.reading import merge

HERE = Path(__file__).parent
DRY_RUN = {
    "model": {"source": "data/arithmetic/policy"},
    "device": "cpu",
    "online": {"prompts": 3, "answers": 4, "prompts_at_once": 3, "max_new_tokens": 24},
}


def dry_run(folder: Path) -> None:
    """Write the ablations of this folder, with a tiny policy and few steps, to another folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ABLATIONS:
        ablation = yaml.safe_load((HERE / f"{name}.yaml").read_text())
        ablation["base"] = merge(ablation["base"], DRY_RUN | {"steps": min(3, ablation["base"]["steps"])})
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(ablation, sort_keys=False))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="the runs and their records, no page")
    parser.add_argument("--page", action="store_true", help="the page of the records, no runs")
    parser.add_argument("--dry-run", type=Path, metavar="FOLDER", help="a few steps of a tiny policy, in FOLDER")
    options = parser.parse_args()
    folder = (options.dry_run or HERE).resolve()
    if options.dry_run and not options.page:
        dry_run(folder)
    if not options.page:
        for ablation in ABLATIONS:
            wb.Experiment(folder / f"{ablation}.yaml").run(where="here", on_event=print)
            write_sampled(folder, ablation)
    if not options.measure:
        print(f"report: {write_fused_ab(folder)}")
