"""Runs for other people's trackers: every run of the workbench becomes one run there, after the fact and offline.

    export     `export_runs`: what is asked for, checked, and handed to a process of its own
    tracked    `TrackedRun`: what every tracker is given; plain data
    __main__   that process
    wandb_like, mlflow_files, tensorboard_events   one kind of tracker each: is a run there already, and write it

Trackers have globals, threads, services and settings from the environment. In a process of its own none of them
reaches a notebook, and when it ends nothing of them is left.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tracker:
    """A tracker that runs can be exported to.

    Attributes:
        package: that must be installed; also the name of the extra that installs it.
        writer: module and class that write its files.
        look: how its users look at what was exported, with {folder} and {project}.
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
