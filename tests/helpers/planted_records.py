"""Records of one small step with and without a fault: inputs of `diagnose` in tests."""

from __future__ import annotations

from tests.helpers.planted_faults import BASE, Found, documents, hidden, shown
from workbench.diagnose.record import Record, RecordedStep, context_of, placed
from workbench.faults import load_fault
from workbench.specs.reading import merge
from workbench.specs.run import RunSpec


def shown_records(name: str, **more: object) -> tuple[Record, Record]:
    """Return the right and the wrong record of settings under which a fault shows."""
    pair = shown(name, **more)
    spec = RunSpec.model_validate(merge(merge(BASE, load_fault(name).shows_in), more))
    return record_of(pair.right, spec, "right"), record_of(pair.wrong, spec, "wrong")


def hidden_records(name: str) -> tuple[Record, Record]:
    """Return both records of settings under which it hides."""
    fault = load_fault(name)
    pair = hidden(name)
    spec = RunSpec.model_validate(merge(merge(BASE, fault.shows_in), fault.hidden_in or {}))
    return record_of(pair.right, spec, "right"), record_of(pair.wrong, spec, "wrong")


def record_of(found: Found, spec: RunSpec, name: str) -> Record:
    """Return the record of a step's result."""
    batch = documents(spec)
    counts, places = placed(spec, batch, range(batch.num_documents), found.tokens)
    step = RecordedStep(
        0,
        found.numbers["loss/total"],
        {key: value for key, value in found.numbers.items() if key != "loss/total"},
        found.norms,
        counts,
        found.gradients,
        dict(found.tokens) | places,
        weight_norms=found.weights,
    )
    return Record(context_of(spec, batch), (step,), name)
