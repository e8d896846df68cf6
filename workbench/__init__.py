"""Compare two configurations of an RL loss and check that every gradient means the same.

A `RolloutBatch` is a training batch: documents in a packed row. A `RunSpec` has all settings that determine a run's
numbers. An `AblationSpec` is a question, and the configurations that answer it. A `RunDirectory` has the results of
a run. A `Comparison` compares every run with its baseline and has the verdicts.

    import workbench as wb

    comparison, page = wb.run_ablation("experiments/layout_parity/ablation.yaml", on_event=print)
    print(comparison)                                  # a verdict on every configuration
    wb.figures.norm_ratios(comparison)                 # the figures of the report

Names are imported when they are first used, so that `import workbench` takes no time.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

__version__ = "0.1.0"

_MODULES = {
    "AblationSpec": "workbench.launch.ablation",
    "Comparison": "workbench.compare.comparison",
    "TruncatedSupport": "workbench.policy.logprobs.truncated_support",
    "Recorder": "workbench.records.recorder",
    "Record": "workbench.diagnose.record",
    "RolloutBatch": "workbench.rollouts.batch",
    "RunDirectory": "workbench.records.directory",
    "RunSpec": "workbench.specs.run",
    "WorkbenchError": "workbench.errors",
    "Sweep": "workbench.launch.sweep",
    "assert_proved": "workbench.prove.asserted",
    "align_loss": "workbench.parallel_loss.align",
    "attach": "workbench.report.panel",
    "bisect": "workbench.compare.bisect",
    "compare_certificates": "workbench.compare.certificates",
    "compare_runs": "workbench.compare.align",
    "conclude": "workbench.cli.run",
    "launch_ablation": "workbench.cli.run",
    "cancel_runs": "workbench.cli.cancel:cancel",
    "verify": "workbench.launch.verify:measure",
    "with_torch_attention": "workbench.policy.torch_attention",
    "describe_runs": "workbench.cli.status:describe",
    "doctor": "workbench.cli.doctor:examine",
    "diagnose": "workbench.diagnose",
    "export_runs": "workbench.cli.export:export",
    "fused_loss": "workbench.policy.logprobs.fused_loss",
    "list_runs": "workbench.cli.ls",
    "load_ablation": "workbench.launch.ablation",
    "load_comparison": "workbench.compare.comparison",
    "load_rollouts": "workbench.rollouts.files:load",
    "project_root": "workbench.records.directory",
    "prove": "workbench.prove",
    "run_ablation": "workbench.cli.run",
    "show": "workbench.report.page",
    "simulate": "workbench.sharding.simulated",
    "write_report": "workbench.report.page",
    "LossExplorer": "workbench.report.loss_explorer",
    "LossSpec": "workbench.specs.losses",
    "credit_map": "workbench.report.credit",
    "loss_curves": "workbench.report.loss_curves",
    "make_loss": "workbench.losses.build",
    "token_credit": "workbench.attribution.credit",
    "token_logprobs": "workbench.policy.logprobs",
    "token_logprobs_from_logits": "workbench.policy.logprobs.from_logits",
    "figures": "workbench.report.figures:",
    "online_curves": "workbench.report.online",
    "trained_policy": "workbench.train.checkpoint",
    "contract_table": "workbench.systems.contracts",
    "explain": "workbench.systems.explanations",
    "loss_spec": "workbench.systems.translate",
    "replay": "workbench.systems.replays",
    "reproducibly": "workbench.reproducible",
    "scaling_contract": "workbench.systems.contracts",
    "settings_for": "workbench.systems.translate",
}
"""Public name -> its module; after a colon its name in the module, or nothing for the module itself."""

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}")
    path, colon, attribute = _MODULES[name].partition(":")
    module = importlib.import_module(path)
    value = module if colon and not attribute else getattr(module, attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])


def _register_with_ipython() -> None:
    """Register the rich displays if IPython runs; otherwise import nothing."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    if get_ipython is not None and (shell := get_ipython()) is not None:
        from workbench.report.rich import register

        register(shell)


_register_with_ipython()
