"""Plans of layouts with fast kernels, on two and on four GPUs, for a dense model and a mixture of experts.

`python -m experiments.gpu_layouts.plans NAME [RECORD.json]` on a machine with the GPUs: the measurement of
`experiments.gpu_layouts.measure` on the plan `NAME.yaml`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from experiments.gpu_layouts.measure import format_record, measure
from workbench.atomic import to_json, write_whole

PLANS = {"two_gpus": 2, "four_gpus": 4, "four_gpus_mixture": 4, "four_gpus_8b": 4, "four_gpus_131k": 4}
"""Name -> ranks of every layout but `one_rank`."""
FOLDER = Path(__file__).parent


def main(arguments: list[str]) -> None:
    """Measure, print and write the record."""
    name = arguments[0]
    record = measure(pairs=5, plan_file=f"{name}.yaml", report_progress=lambda line: print(line, flush=True))
    write_whole(Path(arguments[1]) if arguments[1:] else FOLDER / f"{name}.json", to_json(record))
    print(format_record(record))


if __name__ == "__main__":
    main(sys.argv[1:])
