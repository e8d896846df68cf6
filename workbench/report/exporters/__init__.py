"""Export to experiment trackers: every run of the workbench becomes one run there, offline unless requested.

    export     `export_runs`: checks a request and passes it to a separate process
    tracked    `TrackedRun`: the input of every tracker; plain data
    __main__   that process
    follow     `Tracking`: starts a process that sends runs while they continue
    live       that process
    wandb_like, mlflow_files, tensorboard_events   one kind of tracker each: check for a run, and write it

Trackers have globals, threads, services and settings from the environment. In a separate process none of them reaches
a notebook, and nothing of them is left when it ends.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tracker:
    """A tracker that runs can be exported to.

    Attributes:
        package: required package; also the name of the extra that installs it.
        writer: module and class that write its files.
        look: command to view exported runs, with {folder} and {project}.
    """

    package: str
    writer: str
    look: str


TRACKERS = {
    "wandb": Tracker(
        "wandb",
        "workbench.report.exporters.wandb_like:Wandb",
        "wandb sync {folder}/wandb/offline-run-*   (it uploads; until then nothing leaves this machine)",
    ),
    "trackio": Tracker(
        "trackio",
        "workbench.report.exporters.wandb_like:Trackio",
        "TRACKIO_DIR={folder} trackio show --project {project}",
    ),
    "mlflow": Tracker(
        "mlflow",
        "workbench.report.exporters.mlflow_files:Mlflow",
        "MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri {folder}/mlruns",
    ),
    "tensorboard": Tracker(
        "tensorboard", "workbench.report.exporters.tensorboard_events:TensorBoard", "tensorboard --logdir {folder}"
    ),
}
"""Name on the command line -> tracker."""
