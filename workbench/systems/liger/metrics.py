"""Metrics of Liger's fused GRPO loss, by its definitions. See the package docstring.

Letters: T packed tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

from workbench.metrics.definitions import Metric
from workbench.metrics.quantities import Clip, TermValue
from workbench.metrics.values import Mean
from workbench.systems.alias import Alias, PeerSettings
from workbench.systems.document_metrics import token_share


def names(s: PeerSettings) -> Iterable[Alias]:
    """Yield both metrics of Liger with their definitions, for a loss."""
    where = "beyond the bound that the sign of the advantage pushes towards"
    if s.clip is not None and s.of_documents:
        yield Alias(token_share("clip_fraction", "cut", s.clip, f"share of tokens {where}"), "clip/sign_aware/fraction")
    elif s.clip is not None:
        yield Alias(
            Metric("clip_fraction", f"share of tokens {where}", "1", Clip("cut", s.clip.anchor), Mean()),
            "clip/sign_aware/fraction",
            "looks at the ratio before delta bounds it",
        )
    yield Alias(
        Metric(
            "kl",
            "mean of the KL penalty without its coefficient, with its importance ratio",
            "nats",
            TermValue("kl"),
            Mean(),
        )
    )
