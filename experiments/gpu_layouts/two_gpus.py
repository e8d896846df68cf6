"""Layouts of two GPUs with fast kernels, pipeline stages among them.

`python -m experiments.gpu_layouts.two_gpus [RECORD.json]` on a machine with two GPUs: the measurement of
`experiments.gpu_layouts.measure` on the plan `two_gpus.yaml`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from experiments.gpu_layouts.measure import format_record, measure
from workbench.atomic import to_json, write_whole

PLAN = "two_gpus.yaml"
RECORD = Path(__file__).with_name("two_gpus.json")


def main(arguments: list[str]) -> None:
    """Measure, print and write the record."""
    record = measure(pairs=5, plan_file=PLAN, report_progress=lambda line: print(line, flush=True))
    write_whole(Path(arguments[0]) if arguments else RECORD, to_json(record))
    print(format_record(record))


if __name__ == "__main__":
    main(sys.argv[1:])
