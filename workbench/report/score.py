"""The mutation score of a comparison on its page: known bugs that it would have rejected, or how to measure them."""

from __future__ import annotations

from pathlib import Path

from workbench.compare.comparison import Comparison
from workbench.report.markup import Markup, join, tag
from workbench.sensitivity.record import Sensitivity

FILE = "sensitivity.json"
"""Name of the record next to a page."""
COMMAND = f"python -m workbench sensitivity ABLATION --save {FILE}"


def saved_score(folder: Path) -> Sensitivity | None:
    """Return the score saved next to a page; None if there is none.

    Raises:
        RecordError: the file is damaged, or is no score.
    """
    path = folder / FILE
    return Sensitivity.load(path) if path.exists() else None


def score_note(comparison: Comparison, score: Sensitivity | None) -> Markup | None:
    """Return a paragraph with the score and its survivors, or how to measure it; None if no gradient was compared."""
    if not any(c.against for c in comparison.configurations):
        return None
    if score is None:
        return tag(
            "p",
            "Mutation score: not measured. What this comparison could have seen: ",
            tag("code", COMMAND),
            " plants known bugs in its runs, and predicts and measures which of them it rejects. The report next to "
            "that file has the score here.",
        )
    killed, admissible = score.of_gradients
    survivors = [result for result in score.survivors if result.changes_gradient]
    reasons = {reason for result in survivors for reason in result.missing}
    lines = [
        f"Mutation score: of {admissible} known bugs that make a gradient wrong and act in these runs, the comparison "
        f"rejects {killed}.",
        f"It cannot see {len(survivors)}, for lack of: {'; '.join(sorted(reasons))}." if survivors else "",
    ]
    return join([tag("p", line) for line in lines if line])
