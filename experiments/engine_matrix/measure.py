"""The invariants of training engines, checked against their releases: a matrix by engine, version and invariant.

``make engine-matrix`` builds the environments of `engines/` and writes ``matrix.json`` and ``report.html``, again after
each engine; ``python -m experiments.engine_matrix.measure NAME ...`` measures the named engines again and keeps the
others, each with the commit at which it was measured. Drivers
(`drivers/`) run each engine through its public API; `workbench.engines` sees weights before and after a step, and the
loss and norm that the engine reports.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.engine_matrix.page import page
from workbench.atomic import from_json, to_json, write_whole
from workbench.engines.proof import prove_engine
from workbench.engines.script import Script
from workbench.records.provenance import project_root, provenance

FOLDER = Path(__file__).parent
RECORD = FOLDER / "matrix.json"
VERSIONS = "import importlib.metadata as m, sys; print(*(m.version(name) for name in sys.argv[1:]))"


@dataclass(frozen=True)
class Entry:
    """One row of the matrix.

    Attributes:
        environment: folder below ``.engines``; "" for the workbench's own.
        driver: script below ``drivers``.
        packages: distributions whose versions are the row's.
        options: of the driver.
        expected: invariants that are known to break, with the reason; the measurement must agree.
    """

    environment: str
    driver: str
    packages: tuple[str, ...]
    options: Mapping[str, str]
    expected: Mapping[str, str] = field(default_factory=dict)

    @property
    def python(self) -> Path:
        """Interpreter of its environment."""
        return project_root() / (f".engines/{self.environment}" if self.environment else ".venv") / "bin/python"


MEAN = "the loss of the example is the mean over a micro-batch, and the engine averages these means"
UNEVEN = dict.fromkeys(("accumulation", "partners", "ranks"), MEAN)
TRL = ("trl", "transformers", "accelerate")
HF = ("transformers", "accelerate")
MEGATRON = ("megatron-core",)
ENTRIES: Mapping[str, Entry] = {
    "DDP": Entry("", "of_torch", ("torch",), {"engine": "ddp", "loss": "step"}),
    "DDP, mean of micro-batch": Entry("", "of_torch", ("torch",), {"engine": "ddp", "loss": "mean"}, UNEVEN),
    "FSDP2": Entry("", "of_torch", ("torch",), {"engine": "fsdp2", "loss": "step"}),
    "Trainer": Entry("trl", "of_hf", HF, {"kind": "trainer"}),
    "Trainer, label smoothing": Entry("trl", "of_hf", HF, {"kind": "trainer", "smoothing": "0.1"}),
    "Accelerate": Entry("trl", "of_hf", ("accelerate",), {"kind": "accelerate"}),
    "TRL SFT": Entry("trl", "of_hf", TRL, {"kind": "sft"}),
    "TRL DPO": Entry("trl", "of_hf", TRL, {"kind": "dpo"}),
    "TRL DPO, sigmoid and sft": Entry("trl", "of_hf", TRL, {"kind": "dpo", "loss_type": "sigmoid+sft"}),
    "TRL GRPO, entropy bonus": Entry("trl", "of_hf", TRL, {"kind": "grpo", "loss_type": "dapo", "entropy": "0.1"}),
    "TRL GRPO, dapo": Entry("trl", "of_hf", TRL, {"kind": "grpo", "loss_type": "dapo"}),
    "TRL GRPO, bnpo": Entry(
        "trl",
        "of_hf",
        TRL,
        {"kind": "grpo", "loss_type": "bnpo"},
        dict.fromkeys(("accumulation", "ranks"), "documented: a mean over the local batch"),
    ),
    "verl": Entry("verl", "of_verl", ("verl", "transformers"), {"aggregation": "token-mean"}),
    "verl, token-sum-norm": Entry(
        "verl",
        "of_verl",
        ("verl", "transformers"),
        {"aggregation": "seq-mean-token-sum-norm", "form": "nested"},
    ),
    "Lightning": Entry("lightning", "of_lightning", ("lightning",), {"loss": "step"}),
    "DeepSpeed ZeRO 1": Entry("deepspeed", "of_deepspeed", ("deepspeed",), {"stage": "1", "loss": "step"}),
    "DeepSpeed ZeRO 2": Entry("deepspeed", "of_deepspeed", ("deepspeed",), {"stage": "2", "loss": "step"}),
    "DeepSpeed ZeRO 3": Entry("deepspeed", "of_deepspeed", ("deepspeed",), {"stage": "3", "loss": "step"}),
    "torchtitan": Entry("torchtitan", "of_torchtitan", ("torchtitan",), {"loss": "chunked"}),
    "megatron-core": Entry("megatron", "of_megatron", MEGATRON, {"loss": "token"}),
    "megatron-core, distributed optimizer": Entry(
        "megatron", "of_megatron", MEGATRON, {"loss": "token", "optimizer": "sharded"}
    ),
    "megatron-core, mean of micro-batch": Entry(
        "megatron",
        "of_megatron",
        MEGATRON,
        {"loss": "micro_batch"},
        dict.fromkeys(("accumulation", "partners", "ranks"), "documented: without calculate_per_token_loss"),
    ),
    "Trainer of 2024": Entry(
        "transformers_4_45",
        "of_hf",
        HF,
        {"kind": "trainer"},
        dict.fromkeys(("accumulation", "partners", "ranks"), "fixed in transformers 4.46: num_items_in_batch"),
    ),
}
"""Title -> row of the matrix."""


def versions(entry: Entry) -> str:
    """Return names and versions of an entry's packages, as its environment has them."""
    command = [str(entry.python), "-c", VERSIONS, *entry.packages]
    numbers = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return ", ".join(f"{name} {number}" for name, number in zip(entry.packages, numbers, strict=True))


def measure_entry(title: str, report_progress: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Prove one engine, and return its entry of the record."""
    entry = ENTRIES[title]
    script = Script(entry.python, FOLDER / "drivers" / f"{entry.driver}.py", entry.options, timeout_s=1800)
    proof = prove_engine(script, title=title, report_progress=report_progress, shrink=not entry.environment)
    known = {
        "versions": versions(entry),
        "commit": provenance(project_root())["git"]["commit"],
        "options": dict(entry.options),
        "expected": dict(entry.expected),
    }
    return known | {key: value for key, value in proof.as_json().items() if key != "engine"}


def measure(
    titles: Sequence[str] = (),
    *,
    workers: int = 1,
    kept: Mapping[str, Any] | None = None,
    report_progress: Callable[[str], None] = lambda line: None,
    save: Callable[[dict[str, Any]], None] = lambda record: None,
) -> dict[str, Any]:
    """Measure engines, and return a record with those that were kept.

    Args:
        titles: of `ENTRIES`; all if none is named.
        workers: engines at a time.
        kept: entries of an earlier record.
        report_progress: called with a line after each invariant.
        save: called with the record after each engine.
    """
    chosen, entries = list(titles or ENTRIES), dict(kept or {})
    failed: list[BaseException] = []
    with ThreadPoolExecutor(workers) as pool:
        running = {pool.submit(measure_entry, title, report_progress): title for title in chosen}
        for done in as_completed(running):
            if error := done.exception():
                failed.append(error)
                continue
            entries[running[done]] = done.result()
            save(record_of(entries))
    if failed:  # after the others are saved
        raise failed[0]
    return record_of(entries)


def record_of(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Record of measured engines."""
    return {
        "benchmark": "engine_matrix",
        "command": "make engine-matrix",
        "device": "cpu, gloo",
        "engines": {title: entries[title] for title in ENTRIES if title in entries},
        "bars": {"as expected": {"holds": not unexpected(entries)}},
        "provenance": provenance(project_root()),
    }


def unexpected(entries: Mapping[str, Any]) -> list[str]:
    """Return broken invariants that no entry expects, and expected breaks that were not met."""
    return [
        f"{title}: {name} {result['verdict']}"
        for title, entry in entries.items()
        for name, result in entry["invariants"].items()
        if result["verdict"] not in ("not offered", "failed")
        and (result["verdict"] == "broken") != (name in entry["expected"])
    ]


def main(arguments: list[str] | None = None) -> int:
    """Measure, and write record and page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("titles", nargs="*", choices=[*ENTRIES, []], metavar="ENGINE", help="engines; without any, all")
    parser.add_argument("--workers", type=int, default=1, help="engines at a time")
    options = parser.parse_args(arguments)
    kept = from_json(RECORD.read_text())["engines"] if RECORD.exists() else {}
    measure(
        options.titles,
        workers=options.workers,
        kept={title: entry for title, entry in kept.items() if title in ENTRIES},
        report_progress=lambda line: print(line, flush=True),
        save=_write,
    )
    return 0


def _write(record: dict[str, Any]) -> None:
    write_whole(RECORD, to_json(record))
    write_whole(FOLDER / "report.html", page(record).encode())


if __name__ == "__main__":
    sys.exit(main())
