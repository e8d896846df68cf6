"""Top-k, top-p and min-p of one distribution, from their definitions, in plain floats.

Source: Holtzman et al., arXiv 1904.09751 (top-p); Nguyen et al., arXiv 2407.01082 (min-p).
"""

from __future__ import annotations

import math


def kept(probabilities, *, top_k=None, top_p=1.0, min_p=0.0, order="transformers"):
    """Return the set of kept ids: top-k, then the smallest set with mass p of what is left, then min-p.

    In the order of vLLM min-p comes first: top-k and top-p then see what it left.
    """
    ranked = sorted(range(len(probabilities)), key=lambda v: (-probabilities[v], v))
    if order == "vllm":
        ranked = [v for v in ranked if probabilities[v] >= min_p * probabilities[ranked[0]]]
    left = [
        v for v in ranked if top_k is None or probabilities[v] >= probabilities[ranked[min(top_k, len(ranked)) - 1]]
    ]
    whole, chosen, mass = math.fsum(probabilities[v] for v in left), [], []
    for v in left:
        if chosen and math.fsum(mass) >= top_p * whole and top_p < 1:
            break
        chosen.append(v)
        mass.append(probabilities[v])
    return {v for v in chosen if probabilities[v] >= min_p * probabilities[ranked[0]]}
