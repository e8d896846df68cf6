"""From options of ServiceNow/Fast-LLM to a spec, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.reduction.denominators import GivenCounts
from workbench.specs.losses import LossSpec, ScalingSpec
from workbench.systems.fast_llm.settings import FastLLMSettings
from workbench.systems.registry import Translation
from workbench.systems.translate import checked_back, unsupported

CONTRACTS: Mapping[str, ScalingSpec] = {
    "main": ScalingSpec(multiplied_by=("dp_cp",), engine_divides=("dp_cp",)),
    # ServiceNow/Fast-LLM#520: documents of the step are counted; labels stay those of one pass, added over ranks.
    "docs_per_step (#520), labels": ScalingSpec(counts="pass", multiplied_by=("dp_cp",), engine_divides=("dp_cp",)),
}


def translate(settings: FastLLMSettings) -> Translation:
    """Translate its policy losses: clipped, without penalties, divided by counts of the whole batch."""
    clip = {"clip_low": settings.epsilon_low, "clip_high": settings.epsilon_high, "coefficient": settings.weight}
    if settings.type == "grpo":
        spec = LossSpec(name="grpo", surrogate={"kind": "ppo", **clip}, compat={"scaling": CONTRACTS["main"]})
        notes = ["there is no KL term, entropy bonus, dual clip or sampler correction"]
    else:
        spec = LossSpec(
            name="gspo",
            surrogate={"kind": "gspo", "advantage_level": "document", **clip},
            denominator="document_sum",
            compat={"documents_counted": "all", "scaling": CONTRACTS["main"]},
        )
        notes = [
            "a document is weighted by its length: its clipped term is counted once for each token",
            "advantages are averaged over the document",
        ]
    return Translation(spec, tuple(notes), ("divisor", "num_documents_in_batch", "num_segments", "grad_output"))


def back(spec: LossSpec) -> dict[str, Any]:
    """Return the options of its policy losses for a spec."""
    kind = spec.surrogate.kind
    if kind not in ("ppo", "gspo"):
        raise unsupported("Fast-LLM", f"the surrogate {kind!r}", "its policy losses are grpo and gspo")
    settings = {
        "type": "grpo" if kind == "ppo" else "gspo",
        "epsilon_low": spec.surrogate.get("clip_low"),
        "epsilon_high": spec.surrogate.get("clip_high"),
        "weight": spec.surrogate.coefficient,
    }
    return checked_back("Fast-LLM", spec, FastLLMSettings, translate, settings)


def counts(settings: FastLLMSettings) -> GivenCounts | None:
    """Return the divisor, a count of tokens or of documents."""
    if settings.divisor is None:
        return None
    by_token = settings.type == "grpo"
    return GivenCounts(tokens=settings.divisor) if by_token else GivenCounts(documents=settings.divisor)


def divisor(settings: Any) -> float:
    """Return the temperature: the inverse of the factor that multiplies its logits."""
    return 1 / settings.logits_scale_factor
