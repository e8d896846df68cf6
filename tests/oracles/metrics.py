"""Metrics of a step the long way: one document, one token at a time, from the definitions; plain floats.

A document is a dict of lists, one entry a token: policy, old, sampler, ref (log-probabilities; the last two may be
missing), advantage, entropy, mask. Documents without a token that counts are part of the step.

Definitions of the other systems: Fast-LLM 7d61a1ba, TRL 1.16.0, verl 1dda039b, NeMo-RL 7ea279ab, read from their code.
"""

from __future__ import annotations

import math


def counted(documents, *who):
    """Return (document number, token's dict) of the counted tokens with finite log-probabilities of all of ``who``."""
    results = []
    for number, document in enumerate(documents):
        for t, keep in enumerate(document["mask"]):
            token = {name: values[t] for name, values in document.items()}
            if keep and all(math.isfinite(token[name]) for name in who):
                results.append((number, token))
    return results


def token_mean(documents, value, *who):
    tokens = counted(documents, *who)
    return sum(value(token) for _, token in tokens) / len(tokens) if tokens else math.nan


def document_mean(documents, value, *who):
    """Each document's values over its trained tokens, then the mean over documents that have some."""
    total = weight = 0.0
    for number, token in counted(documents, *who):
        length = sum(documents[number]["mask"])
        total += value(token) / length
        weight += 1 / length
    return total / weight if weight else math.nan


def deviation(values):
    if not values:
        return math.nan
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))


def effective(values):
    return sum(values) ** 2 / sum(v * v for v in values) if any(values) else math.nan


def estimate(kind, first, second):
    """KL(first || second) from a token sampled by first."""

    def value(token):
        d = token[second] - token[first]
        return {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - d - 1, "abs": abs(d)}[kind]

    return value


def ratio(above, below):
    return lambda token: math.exp(token[above] - token[below])


def document_ratios(documents, above="policy", below="old"):
    """exp of the mean log ratio of each document that has trained tokens."""
    ratios = []
    for document in documents:
        logs = [
            a - b
            for a, b, keep in zip(document[above], document[below], document["mask"], strict=True)
            if keep and math.isfinite(a) and math.isfinite(b)
        ]
        if logs:
            ratios.append(math.exp(sum(logs) / len(logs)))
    return ratios


def segments(documents):
    count = 0
    for document in documents:
        before = 0
        for keep in document["mask"]:
            count += bool(keep) and not before
            before = keep
    return count


def canonical(documents, *, lower, upper):
    """Return every canonical metric that needs no output of a loss's terms."""
    there = [who for who in ("policy", "old", "sampler", "ref") if who in documents[0]]
    tokens = [token for _, token in counted(documents)]
    out = {
        "tokens/trained/sum": len(tokens),
        "tokens/nonfinite/sum": sum(not all(math.isfinite(token[who]) for who in there) for token in tokens),
        "documents/trained/sum": sum(1 for document in documents if any(document["mask"])),
        "segments/trained/sum": segments(documents),
        "advantage/all/mean": token_mean(documents, lambda t: t["advantage"]),
        "advantage/all/document_mean": document_mean(documents, lambda t: t["advantage"]),
        "advantage/all/min": min((t["advantage"] for t in tokens), default=math.inf),
        "advantage/all/max": max((t["advantage"] for t in tokens), default=-math.inf),
        "advantage/all/std": deviation([t["advantage"] for t in tokens]),
        "advantage/zero/fraction": token_mean(documents, lambda t: t["advantage"] == 0),
        "entropy/policy/mean": token_mean(documents, lambda t: t["entropy"]),
        "entropy/policy/document_mean": document_mean(documents, lambda t: t["entropy"]),
        "entropy/policy/min": min((t["entropy"] for t in tokens), default=math.inf),
        "entropy/policy/max": max((t["entropy"] for t in tokens), default=-math.inf),
    }
    for who in there:
        out[f"logprob/{who}/mean"] = token_mean(documents, lambda t, who=who: t[who], who)
        out[f"logprob/{who}/document_mean"] = document_mean(documents, lambda t, who=who: t[who], who)
    for above, below in (("policy", "old"), ("old", "sampler"), ("policy", "sampler")):
        if above not in there or below not in there:
            continue
        name, value = f"ratio/{above}_{below}", ratio(above, below)
        ratios = [value(token) for _, token in counted(documents, above, below)]
        out |= {
            f"{name}/mean": token_mean(documents, value, above, below),
            f"{name}/document_mean": document_mean(documents, value, above, below),
            f"{name}/std": deviation(ratios),
            f"{name}/min": min(ratios, default=math.inf),
            f"{name}/max": max(ratios, default=-math.inf),
            f"{name}/sum": sum(ratios),
            f"{name}/squared_sum": sum(r * r for r in ratios),
            f"{name}/effective_samples": effective(ratios),
            f"{name}/log_mean": math.log(sum(ratios) / len(ratios)) if ratios else math.nan,
        }
        whole = document_ratios(documents, above, below)
        out |= {
            f"ratio_document/{above}_{below}/mean": sum(whole) / len(whole) if whole else math.nan,
            f"ratio_document/{above}_{below}/std": deviation(whole),
            f"ratio_document/{above}_{below}/min": min(whole, default=math.inf),
            f"ratio_document/{above}_{below}/max": max(whole, default=-math.inf),
            f"ratio_document/{above}_{below}/effective_samples": effective(whole),
        }
    for first in there:
        for second in there:
            if first != second and (first, second) not in {
                ("ref", "policy"),
                ("ref", "old"),
                ("old", "ref"),
                ("ref", "sampler"),
                ("sampler", "ref"),
            }:
                for kind in ("k1", "k2", "k3", "abs"):
                    out[f"kl/{first}_{second}/{kind}_mean"] = token_mean(
                        documents, estimate(kind, first, second), first, second
                    )
    out["kl/old_policy/k3_document_mean"] = document_mean(documents, estimate("k3", "old", "policy"), "old", "policy")
    for name, test in regions(lower, upper).items():
        out[f"clip/{name}/fraction"] = token_mean(
            documents, lambda t, test=test: test(ratio("policy", "old")(t), t["advantage"]), "policy", "old"
        )
    outside = regions(lower, upper)["region"]
    out["clip/region/document_mean"] = document_mean(
        documents, lambda t: outside(ratio("policy", "old")(t), t["advantage"]), "policy", "old"
    )
    return out


def regions(lower, upper):
    return {
        "region": lambda r, a: r < lower or r > upper,
        "region_low": lambda r, a: r < lower,
        "region_high": lambda r, a: r > upper,
        "sign_aware": lambda r, a: (r > upper and a > 0) or (r < lower and a < 0),
        "sign_aware_low": lambda r, a: r < lower and a < 0,
        "sign_aware_high": lambda r, a: r > upper and a > 0,
    }


# ---- metrics of other systems under their own names ----------------------------------------------------


def fast_llm(documents, *, lower, upper, sequence=False, num_documents):
    """Sums of document means, divided by all documents of the step; sums of ratios undivided."""

    def mean(value):
        total = 0.0
        for document in documents:
            own = [value(token) for _, token in counted([document])]
            total += sum(own) / len(own) if own else 0.0
        return total / num_documents

    tokens = [token for _, token in counted(documents)]
    out = {
        "new_logprobs": mean(lambda t: t["policy"]),
        "old_logprobs": mean(lambda t: t["old"]),
        "advantage": mean(lambda t: t["advantage"]),
        "entropy": mean(lambda t: t["entropy"]),
        "max_advantage": max(t["advantage"] for t in tokens),
        "min_advantage": min(t["advantage"] for t in tokens),
        "num_tokens": len(tokens),
    }
    if sequence:
        ratios = document_ratios(documents)
        out |= {
            "ratio_new_old": sum(ratios) / num_documents,
            "kl_new_old": sum(r - math.log(r) - 1 for r in ratios) / num_documents,
            "clipped_ratio_fraction": sum(r < lower or r > upper for r in ratios) / num_documents,
            "ratio_new_old_sum": sum(ratios),
            "ratio_new_old_squared_sum": sum(r * r for r in ratios),
            "num_segments": len(ratios),
        }
    else:
        value = ratio("policy", "old")
        out |= {
            "ratio_new_old": mean(value),
            "kl_new_old": mean(lambda t: value(t) - math.log(value(t)) - 1),
            "clipped_ratio_fraction": mean(lambda t: value(t) < lower or value(t) > upper),
            "ratio_new_old_sum": sum(map(value, tokens)),
            "ratio_new_old_squared_sum": sum(value(t) ** 2 for t in tokens),
        }
    return out


def trl(documents, *, lower, upper, sequence=False, num_documents):
    """Token means; with a sequence ratio its clip is a mean over all rows, also rows in which nothing counts."""
    out = {"entropy": token_mean(documents, lambda t: t["entropy"])}
    if "ref" in documents[0]:
        out["kl"] = token_mean(documents, estimate("k3", "policy", "ref"))
    tests = regions(lower, upper)
    names = {"low_mean": "sign_aware_low", "high_mean": "sign_aware_high", "region_mean": "sign_aware"}
    shares = {name: [] for name in names}
    for document in documents:
        own = [token for _, token in counted([document])]
        if not own:
            continue
        if sequence:
            whole = document_ratios([document])[0]
            values = [(whole, sum(t["advantage"] for t in own) / len(own))]
        else:
            values = [(ratio("policy", "old")(t), t["advantage"]) for t in own]
        for name, test in names.items():
            shares[name].append((sum(tests[test](r, a) for r, a in values), len(values)))
    for name, pairs in shares.items():
        out[f"clip_ratio/{name}"] = sum(s for s, _ in pairs) / (num_documents if sequence else sum(n for _, n in pairs))
    out["clip_ratio/low_min"] = min(s / n for s, n in shares["low_mean"])
    out["clip_ratio/high_max"] = max(s / n for s, n in shares["high_mean"])
    if not sequence:
        out["cispo_clip_ratio"] = token_mean(
            documents, lambda t: tests["sign_aware_high"](ratio("policy", "old")(t), t["advantage"])
        )
    if "sampler" in documents[0]:
        gaps = [abs(t["old"] - t["sampler"]) for _, t in counted(documents)]
        out["sampling/sampling_logp_difference/mean"] = sum(gaps) / len(gaps)
        out["sampling/sampling_logp_difference/max"] = max(gaps)
    return out


def verl(documents, *, lower, upper, dual=None, sequence=False):
    """Token means of the actor's metrics; means over all sequences, empty ones too, of the rollout correction's."""

    def limited(d):
        return max(-20.0, min(20.0, d))

    tokens = counted(documents)
    numbers = [n for n, document in enumerate(documents) if any(document["mask"])]
    whole = dict(zip(numbers, document_ratios(documents), strict=True))
    cut = regions(lower, upper)["sign_aware"]

    def own(number, token):
        return whole[number] if sequence else math.exp(limited(token["policy"] - token["old"]))

    def mean(value):
        return sum(value(n, t) for n, t in tokens) / (len(tokens) + 1e-8)

    def apart(_, token):
        return token["old"] - token["policy"] if sequence else -limited(token["policy"] - token["old"])

    out = {
        "actor/ppo_kl": mean(apart),
        "actor/entropy": mean(lambda _, t: t["entropy"]),
        "actor/pg_clipfrac": mean(lambda n, t: cut(own(n, t), t["advantage"])),
        "actor/pg_clipfrac_lower": 0.0,
    }
    if dual is not None and not sequence:
        out["actor/pg_clipfrac_lower"] = mean(lambda n, t: own(n, t) > dual and t["advantage"] < 0)
    if "ref" in documents[0]:

        def low_var(token):
            d = limited(token["ref"] - token["policy"])
            return max(-10.0, min(10.0, math.exp(d) - d - 1))

        out["actor/kl_loss"] = mean(lambda _, t: low_var(t))
    if "sampler" in documents[0]:
        out |= {f"rollout_corr/{name}": value for name, value in _verl_mismatch(documents, limited).items()}
    return out


def _verl_mismatch(documents, limited):
    tokens = [token for _, token in counted(documents)]
    gaps = [t["old"] - t["sampler"] for t in tokens]
    per = []
    for document in documents:
        own, count = [token for _, token in counted([document])], 1e-8
        count += len(own)
        per.append((sum(t["old"] for t in own) / count, sum(t["sampler"] for t in own) / count, count))
    differences = [s - o for o, s, _ in per]
    n, tokens = len(per), len(gaps) + 1e-8
    return {
        "kl": -sum(gaps) / tokens,
        "k3_kl": sum(math.exp(d) - d - 1 for d in gaps) / tokens,
        "training_log_ppl": sum(-o for o, _, _ in per) / n,
        "training_ppl": sum(math.exp(-o) for o, _, _ in per) / n,
        "rollout_log_ppl": sum(-s for _, s, _ in per) / n,
        "rollout_ppl": sum(math.exp(-s) for _, s, _ in per) / n,
        "log_ppl_diff": sum(differences) / n,
        "log_ppl_abs_diff": sum(map(abs, differences)) / n,
        "log_ppl_diff_max": max(differences),
        "log_ppl_diff_min": min(differences),
        "ppl_ratio": sum(math.exp(d) for d in differences) / n,
        "chi2_token": sum(math.exp(2 * limited(d)) for d in gaps) / tokens - 1,
        "chi2_seq": sum(math.exp(2 * limited((o - s) * length)) for o, s, length in per) / n - 1,
    }


def nemo_rl(documents, *, lower, upper, sequence=False, num_documents, kind="k3"):
    """Token sums over (tokens + 1e-8)."""

    def mean(value):
        tokens = counted(documents)
        return sum(value(number, token) for number, token in tokens) / (len(tokens) + 1e-8)

    numbers = [n for n, document in enumerate(documents) if any(document["mask"])]
    whole = dict(zip(numbers, document_ratios(documents), strict=True))

    def r(number, token):
        return whole[number] if sequence else ratio("policy", "old")(token)

    def clamped(number, token):
        return max(lower, min(upper, r(number, token)))

    pairs = counted(documents)
    out = {
        "probs_ratio": mean(r),
        "probs_ratio_clamped": mean(clamped),
        "probs_ratio_min": min(r(*p) for p in pairs),
        "probs_ratio_max": max(r(*p) for p in pairs),
        "probs_ratio_clamped_min": min(clamped(*p) for p in pairs),
        "probs_ratio_clamped_max": max(clamped(*p) for p in pairs),
        "num_valid_samples": num_documents,
        "global_valid_toks": len(pairs),
        "global_valid_seqs": num_documents,
    }
    if "sampler" in documents[0]:

        def js(_, t):
            mixture = math.log((math.exp(t["old"]) + math.exp(t["sampler"])) / 2)
            return sum(math.exp(t[who] - mixture) - (t[who] - mixture) - 1 for who in ("old", "sampler")) / 2

        out |= {
            "token_mult_prob_error": mean(lambda _, t: math.exp(abs(t["sampler"] - t["old"]))),
            "gen_kl_error": mean(lambda _, t: estimate(kind, "sampler", "old")(t)),
            "policy_kl_error": mean(lambda _, t: estimate(kind, "old", "sampler")(t)),
            "js_divergence_error": mean(js),
            "approx_entropy": mean(lambda _, t: -math.exp(t["policy"] - t["sampler"]) * t["policy"]),
        }
    return out
