"""`trivial_rank` with the imports that a real run's rank needs before it joins its job."""

from __future__ import annotations

import workbench.train.worker  # noqa: F401 (its cost is what is measured)
from experiments.benchmarks.trivial_rank import main

if __name__ == "__main__":
    main()
