"""Run the ablations of this folder and write report.html: `python experiments/normalisation/report.py`."""

from pathlib import Path

import workbench as wb
from experiments.normalisation.page import PARTS, write_normalisation

HERE = Path(__file__).parent

if __name__ == "__main__":
    for ablation in PARTS:
        wb.Experiment(HERE / f"{ablation}.yaml").run(where="here", on_event=print)
    print(f"report: {write_normalisation(HERE).relative_to(HERE.parents[1])}")
