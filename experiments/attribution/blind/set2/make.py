"""Write the set: ``python make.py OUT`` writes models, planted and clean cases there. Seeds are in the files."""

from __future__ import annotations

import os
import sys
from pathlib import Path

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")

import torch  # noqa: E402
from transformers import logging  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parent))

from cases import CASES  # noqa: E402
from clean import clean_cases  # noqa: E402
from models import write_models  # noqa: E402
from sampler import World, recorded, write_case  # noqa: E402


def make(out: Path) -> None:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    write_models(out / "models")
    world = World(out / "models")
    for part, cases in (("planted", CASES), ("clean", clean_cases())):
        for case in sorted(cases, key=lambda one: one.model):  # a model's engines are used while they are kept
            write_case(out / part / case.id, case, recorded(world, case))
            print(part, case.id, flush=True)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
