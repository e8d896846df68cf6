"""A proof for the test suite of another project: one call, which fails with the table of invariants."""

from __future__ import annotations

from typing import Any

from workbench.errors import VerdictError
from workbench.prove import prove
from workbench.prove.proof import Proof


def assert_proved(loss: Any, **settings: Any) -> Proof:
    """Fail unless a loss keeps every requested invariant, and all of them were tried.

    Args:
        loss: any loss that `workbench.prove` accepts.
        **settings: of `workbench.prove`: engine, spec, seed, invariants, budget_s.

    Returns:
        The proof. An invariant that the loss's spec declares to break is no failure.

    Raises:
        VerdictError: an AssertionError with the table of invariants and the counterexamples.

    Example:
        >>> import workbench as wb
        >>> def test_our_loss_means_the_same_on_every_layout():
        ...     wb.assert_proved(our_microbatch_loss, engine="mean")  # doctest: +SKIP
    """
    proof = prove(loss, **settings)
    if not proof.ok:
        raise VerdictError(
            f"prove {proof.subject}",
            found=str(proof),
            rule="loss, gradient and metrics are those of one unsplit process",
            fix="begin with the first broken invariant: its counterexample is the smallest that was found",
        )
    return proof
