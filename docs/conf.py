"""The manual as a site: `make docs`.

The source directory is the root of the repository, so that relative links between docs/, notebooks/, READMEs of
packages and records are the same on a code host and in the site. API pages are written at the start of a build.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))

from _api import write_api_pages  # noqa: E402

project = "workbench"
author = "the workbench contributors"
extensions = ["myst_nb"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
root_doc = "docs/README"
include_patterns = [
    "*.md",
    "docs/*.md",
    "docs/guides/*.md",
    "docs/guides/systems/*.md",
    "docs/reference/**/*.md",
    "docs/reference/*.md",
    "notebooks/*.md",
    "notebooks/*.ipynb",
    "tests/README.md",
    "workbench/*/README.md",
    "experiments/diagnosis/*.md",
    "experiments/engine_matrix/*.md",
    "experiments/*/blind/README.md",
    "experiments/*/blind/*/README.md",
    "tests/slurm/README.md",
    "engines/README.md",
]
exclude_patterns = [".venv", "docs/_build"]

html_theme = "furo"
html_title = "workbench"
html_static_path: list[str] = []
html_copy_source = False
html_show_sourcelink = False
templates_path: list[str] = []

myst_heading_anchors = 4
suppress_warnings = ["ref.python"]  # a name without its module that several modules have, in signatures
myst_enable_extensions = ["colon_fence"]
nb_execution_mode = os.environ.get("DOCS_NOTEBOOKS", "cache")
nb_execution_cache_path = str(ROOT / "docs/_build/notebooks")
nb_execution_timeout = 3600  # seconds a cell: the longest takes 100 on two idle cores; 900 were too few at a load of 50
nb_execution_raise_on_error = True
nb_execution_in_temp = False

python_maximum_signature_line_length = 100
python_use_unqualified_type_names = True
toc_object_entries = False

CONTENTS = """
```{toctree}
:hidden:

concepts
```

```{toctree}
:hidden:
:caption: Guides

guides/your-run
guides/ablations
guides/your-loss
guides/layouts
guides/mixtures
guides/lora
guides/precision
guides/reproducible-runs
guides/online-rl
guides/two-modules
guides/prove
guides/your-trainer
guides/diagnose
guides/what-a-check-can-see
guides/check-a-step
guides/trainer-and-sampler
guides/systems/verl
guides/systems/trl
guides/systems/slime
guides/systems/miles
guides/systems/nemo_rl
guides/systems/prime_rl
guides/systems/pipelinerl
guides/systems/skyrl
guides/systems/openrlhf
guides/systems/areal
guides/systems/roll
guides/other-systems
guides/log-probabilities
guides/rollouts
guides/reports
guides/clusters
guides/security
guides/for-programs
SKILL
```

```{toctree}
:hidden:
:caption: Reference

reference/index
reference/json
reference/mistakes
reference/causes
reference/api/index
benchmarks
../DECISIONS
```

```{toctree}
:hidden:
:caption: Packages

../workbench/attach/README
../workbench/report/README
../workbench/launch/README
../workbench/compare/README
../workbench/prove/README
../workbench/diagnose/README
../workbench/check/README
../workbench/mismatch/README
../workbench/train/README
../workbench/systems/README
../workbench/records/README
../workbench/dumps/README
../workbench/metrics/README
../workbench/parallel_loss/README
../workbench/reduction/README
../workbench/reproducible/README
../workbench/policy/README
../workbench/losses/README
../workbench/sharding/README
../workbench/rollouts/README
```

```{toctree}
:hidden:
:caption: Notebooks

../notebooks/README
../notebooks/01_quickstart
../notebooks/02_losses_side_by_side
../notebooks/03_where_the_tokens_go
../notebooks/04_reduction_is_where_it_breaks
../notebooks/05_logprobs_without_logits
../notebooks/06_two_layouts_one_model
../notebooks/07_a_small_rl_run
../notebooks/08_what_precision_costs
../notebooks/09_five_dimensions
../notebooks/10_another_systems_step
../notebooks/11_trainer_and_sampler
../notebooks/12_what_a_check_can_see
```

```{toctree}
:hidden:
:caption: Project

Overview <../README>
Architecture <../ARCHITECTURE>
Contributing <../CONTRIBUTING>
Tests <../tests/README>
Changes <../CHANGELOG>
Diagnosis, every fault <../experiments/diagnosis/report>
Diagnosis, unseen faults <../experiments/diagnosis/unseen>
Engines <../engines/README>
Slurm in tests <../tests/slurm/README>
```

```{toctree}
:hidden:
:glob:
:caption: Blind sets and breaks

../experiments/*/blind/README
../experiments/*/blind/*/README
../experiments/engine_matrix/*
```
"""
"""Navigation of the site, appended to docs/README.md, which is a plain list on a code host."""


def setup(app):
    """Write the API pages before Sphinx looks for sources, and a front page that leads to the manual."""
    app.connect("config-inited", lambda *_: write_api_pages())
    app.connect("source-read", _append_contents)
    app.connect("build-finished", _write_front_page)


def _append_contents(app, name, source):
    if name == root_doc:
        source[0] += CONTENTS


def _write_front_page(app, error):
    if error is None and app.builder.format == "html":
        page = '<!doctype html><title>workbench</title><meta http-equiv="refresh" content="0; url=docs/README.html">'
        (Path(app.outdir) / "index.html").write_text(f"{page}\n")
