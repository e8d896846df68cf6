"""Compare two configurations of an RL loss and check that every gradient means the same.

A `RolloutBatch` is a training batch: documents in a packed row. A `RunSpec` has all settings that determine a run's
numbers. An `Experiment` is a question with the configurations that answer it: it launches their runs and compares
each with its baseline. A `Comparison` has the verdicts.

    import workbench as wb

    experiment = wb.Experiment("experiments/layout_parity/ablation.yaml")
    comparison = experiment.run(on_event=print)
    print(comparison)                                  # a verdict on every configuration
    wb.figures.norm_ratios(comparison)                 # the figures of the report

Everything else is reached through its package, such as `wb.sharding.orders`. Names and modules are imported when they
are first used, so that `import workbench` takes no time.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "Experiment": "workbench.experiment",
    "Comparison": "workbench.compare.comparison",
    "figures": "workbench.report.figures:",
    "show": "workbench.report.summary",
    "RunSpec": "workbench.specs.run",
    "LossSpec": "workbench.specs.losses",
    "RolloutBatch": "workbench.rollouts.batch",
    "load_rollouts": "workbench.rollouts.importers",
    "project_root": "workbench.records.provenance",
    "build_loss": "workbench.losses.build",
    "LossInputs": "workbench.losses.terms",
    "token_logprobs": "workbench.policy.logprobs",
    "fused_loss": "workbench.policy.logprobs.fused_loss",
    "token_credit": "workbench.attribution",
    "align_loss": "workbench.parallel_loss.align",
    "simulate": "workbench.sharding.simulated",
    "reproducibly": "workbench.reproducible",
    "prove": "workbench.prove",
    "assert_proved": "workbench.prove",
    "prove_engine": "workbench.engines.proof",
    "assert_engine_proved": "workbench.engines.proof",
    "planted_faults": "workbench.faults",
    "Recorder": "workbench.records.recorder",
    "Record": "workbench.diagnose.record",
    "RecordedStep": "workbench.diagnose.record",
    "diagnose": "workbench.diagnose",
    "check_step": "workbench.check",
    "attribute": "workbench.mismatch",
    "bisect": "workbench.compare.bisect",
    "sensitivity": "workbench.mutation_score",
    "assert_sensitive": "workbench.mutation_score",
    "assert_agrees": "workbench.diagnose",
    "Gate": "workbench.sensitivity.gates",
    "Tolerance": "workbench.sensitivity.gates",
    "loss_spec": "workbench.systems.translate",
    "explain": "workbench.systems.explanations",
    "replay": "workbench.systems.replays",
    "WorkbenchError": "workbench.errors",
}
"""Public name -> its module; after a colon its name in the module, or nothing for the module itself."""

__all__ = list(_PUBLIC)


class _Package(ModuleType):
    """A package whose modules are its attributes, imported when they are first used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or find_spec(f"{self.__name__}.{name}") is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return importlib.import_module(f"{self.__name__}.{name}")

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, as the import system does for each module: packages become lazy too.

        A public name stays what it is when the package of the same name is imported: `prove`, `diagnose`.
        """
        if isinstance(value, ModuleType) and value.__name__ == f"{self.__name__}.{name}":
            _open(value)
            if self is sys.modules[__name__] and name in _PUBLIC:
                return
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *(module.name for module in pkgutil.iter_modules(self.__path__))})


def _open(package: ModuleType) -> None:
    """Make a package lazy, with the packages in it that have been imported already."""
    if hasattr(package, "__path__") and not isinstance(package, _Package):
        package.__class__ = _Package
        for name, value in list(vars(package).items()):
            if isinstance(value, ModuleType) and value.__name__ == f"{package.__name__}.{name}":
                _open(value)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}")
    path, colon, attribute = _PUBLIC[name].partition(":")
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "workbench"):
            raise
        fix = "pip install -e . in the folder of pyproject.toml"
        raise ModuleNotFoundError(f"workbench.{name} needs {missing!r}: {fix}", name=error.name) from None
    value = module if colon and not attribute else getattr(module, attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *_PUBLIC]


def _register_with_ipython() -> None:
    """Register the rich displays if IPython runs; otherwise import nothing."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    if get_ipython is not None and (shell := get_ipython()) is not None:
        from workbench.report.rich import register

        register(shell)


_open(sys.modules[__name__])
_register_with_ipython()
