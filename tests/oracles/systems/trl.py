"""huggingface/trl 1.16.0 row by row, from its formulas. float64. Imports nothing from workbench.

Only positions that count are looked at, with one exception: VESPO adds up the logs of ready-made weights over the whole
row. Arrays are [B, T] tensors, next-token aligned; options are those of `GRPOConfig`, and what a call is handed.
"""

import math

import torch


def policy_loss(options, arrays):
    """Loss, gradient by ``logprobs`` and metrics of one micro-batch."""
    leaf = arrays["logprobs"].clone().requires_grad_()
    rows = [Row(number, options, arrays, leaf) for number in range(len(leaf))]
    floor = threshold(options, rows)
    for row in rows:
        row.evaluate(floor)
    tokens = sum(row.count for row in rows)
    kind, steps = options["loss_type"], options["gradient_accumulation_steps"]
    sums = [row.values.sum() if row.count else leaf.sum() * 0 for row in rows]
    if kind in ("grpo", "sapo"):
        loss = sum(total / max(row.count, 1) for total, row in zip(sums, rows, strict=True)) / len(rows) / steps
    elif kind == "bnpo":
        loss = sum(sums) / max(tokens, 1) / steps
    elif kind == "dr_grpo":
        loss = sum(sums) / (len(rows) * options["max_completion_length"]) / steps
    elif kind == "luspo":
        loss = sum(sums) / len(rows) / steps
    else:
        loss = sum(sums) / (max(options["num_items_in_batch"], 1) * steps / options["steps_per_generation"])
    result = metrics(options, arrays, rows, tokens)
    if options["entropy_coef"]:
        result["policy_loss"] = loss.item() * (1 if kind in ("dapo", "cispo", "vespo") else steps)
        chosen = [float(h) for row in rows for h, kept in zip(row.entropies, row.confident, strict=True) if kept]
        loss = loss - options["entropy_coef"] * math.fsum(chosen) / max(len(chosen), 1) / steps
    loss.backward()
    return {"loss": loss.item(), "grad_logprobs": leaf.grad, "metrics": result}


class Row:
    """One completion."""

    def __init__(self, number, options, arrays, leaf):
        self.options, self.at = options, torch.nonzero(arrays["mask"][number]).squeeze(1)
        self.count = len(self.at)

        def here(name):
            return None if name not in arrays else arrays[name][number].expand(leaf.shape[1])[self.at]

        self.x, self.reference, self.entropies = leaf[number][self.at], here("ref_logprobs"), here("entropies")
        self.old = self.x.detach() if "old_logprobs" not in arrays else here("old_logprobs")
        self.sampler = self.old if "rollout_logprobs" not in arrays else here("rollout_logprobs")
        given = arrays["advantages"][number]
        self.advantages = (given if given.dim() else given.expand(leaf.shape[1]))[self.at]
        self.weights = here("is_weights") if options["vllm_is"] or options["loss_type"] == "vespo" else None
        self.all_weights = arrays["is_weights"][number] if self.weights is not None else None

    @property
    def ratio(self):
        """Of each token; at sequence level one number, 1 for a row in which nothing counts."""
        log_ratio = self.x - self.old
        if self.options["importance_sampling_level"] == "token":
            return log_ratio.exp()
        return torch.exp(log_ratio.sum() / max(self.count, 1)).expand(self.count)

    def evaluate(self, floor):
        """Values of each token, to be minimised."""
        self.confident = [floor is None or float(h) >= floor for h in self.entropies]
        if not self.count:
            return
        options, ratio = self.options, self.ratio
        values = torch.stack([self.token(float(self.advantages[t]), ratio[t], self.x[t]) for t in range(self.count)])
        if options["off_policy_mask_threshold"] is not None:
            gaps = [float(s - x) for s, x in zip(self.sampler, self.x.detach(), strict=True)]
            drift = math.fsum(gap for gap in gaps if not math.isnan(gap)) / self.count
            kept = [a >= 0 or drift <= options["off_policy_mask_threshold"] for a in self.advantages.tolist()]
            values = torch.where(torch.tensor(kept), values, 0.0)
        values = torch.where(torch.tensor(self.confident), values, 0.0)
        if self.weights is not None and options["loss_type"] != "vespo":
            values = values * self.weights
        if options["beta"]:
            d = self.reference - self.x
            self.divergence = d.exp() - d - 1
            if options["use_bias_correction_kl"]:
                self.divergence = self.divergence * ratio
            values = values + options["beta"] * self.divergence
        self.values = values

    def token(self, advantage, ratio, logprob):
        """The surrogate of one token."""
        options, kind = self.options, self.options["loss_type"]
        if kind == "cispo":
            return -min(float(ratio.detach()), options["epsilon_high"]) * advantage * logprob
        if kind == "sapo":
            tau = options["sapo_temperature_pos"] if advantage > 0 else options["sapo_temperature_neg"]
            return -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantage
        if kind == "vespo":
            return -self.gamma(advantage) * advantage * logprob
        bounded = ratio if options["delta"] is None or ratio <= options["delta"] else ratio.new_tensor(options["delta"])
        clipped = ratio.clamp(1 - options["epsilon_low"], 1 + options["epsilon_high"])
        return -torch.minimum(bounded * advantage, clipped * advantage)

    def gamma(self, advantage):
        """phi of the row, which depends on the sign of the advantage."""
        low = math.log(1e-8)
        log_w = math.fsum(min(max(float(d), -20.0), 20.0) for d in (self.x - self.old).detach())
        for weight in [] if self.all_weights is None else self.all_weights.tolist():
            log_w += min(max(math.log(weight), low), 20.0) if weight > 0 else low
        log_w = min(max(log_w, low), 20.0)
        side = "pos" if advantage >= 0 else "neg"
        k, decay = self.options["vespo"][f"k_{side}"], max(self.options["vespo"][f"lambda_{side}"], 1e-4)
        return math.exp(decay + k * log_w - decay * math.exp(log_w))


def threshold(options, rows):
    """The entropy that a token must have; None: any."""
    share = options["top_entropy_quantile"]
    known = sorted(float(h.float()) for row in rows for h in row.entropies)
    if share == 1 or not known:
        return None
    return float(torch.quantile(torch.tensor(known, dtype=torch.float32), 1 - share))


def metrics(options, arrays, rows, tokens):
    """Under TRL's names."""
    counted = [row for row in rows if row.count]
    results = {"entropy": math.fsum(float(h) for row in counted for h in row.entropies) / tokens}
    if options["beta"]:
        results["kl"] = math.fsum(float(value) for row in counted for value in row.divergence.detach()) / tokens
    of_rows = options["importance_sampling_level"] == "sequence" and arrays["advantages"].dim() == 1
    kind = options["loss_type"]

    def flags(row, low, high):
        """Return per token whether the ratio is beyond a bound in the advantage's direction: (below, above)."""
        cap = math.inf if options["delta"] is None or kind == "cispo" else options["delta"]
        ratios = [min(r, cap) for r in row.ratio.detach().tolist()]
        pairs = list(zip(ratios, row.advantages.tolist(), strict=True))
        return [r < low and a < 0 for r, a in pairs], [r > high and a > 0 for r, a in pairs]

    def mean(of):
        """Over tokens, or over all rows, of which those without tokens count as 0."""
        if of_rows:
            return sum(of(row)[0] for row in counted) / len(rows)
        return sum(sum(of(row)) for row in counted) / tokens

    if kind == "cispo":
        results["cispo_clip_ratio"] = mean(lambda row: flags(row, -math.inf, options["epsilon_high"])[1])
    elif kind == "vespo":
        weights = [[row.gamma(a) for a in row.advantages.tolist()] for row in counted]
        if arrays["advantages"].dim() == 1:
            results["vespo/phi_seq_mean"] = (sum(w[0] for w in weights) + len(rows) - len(counted)) / len(rows)
        else:
            results["vespo/phi_seq_mean"] = sum(sum(w) for w in weights) / tokens
    elif kind != "sapo":
        low, high = 1 - options["epsilon_low"], 1 + options["epsilon_high"]
        results["clip_ratio/low_mean"] = mean(lambda row: flags(row, low, high)[0])
        results["clip_ratio/high_mean"] = mean(lambda row: flags(row, low, high)[1])
        results["clip_ratio/region_mean"] = results["clip_ratio/low_mean"] + results["clip_ratio/high_mean"]
        shares = [[sum(side) / row.count for side in flags(row, low, high)] for row in counted]
        if of_rows and len(counted) < len(rows):
            shares.append([0.0, 0.0])
        results["clip_ratio/low_min"] = min(share[0] for share in shares)
        results["clip_ratio/high_max"] = max(share[1] for share in shares)
    return results


def is_weights(options, arrays):
    """The correction for vLLM: one weight a token (1 where nothing counts), or one a row."""
    low = -math.inf if options["clip_min"] is None else options["clip_min"]
    high = math.inf if options["clip_max"] is None else options["clip_max"]
    results = []
    for old, sampler, mask in zip(arrays["old_logprobs"], arrays["rollout_logprobs"], arrays["mask"], strict=True):
        gaps = [
            float(o - s) if m and not math.isnan(float(s)) else 0.0 for o, s, m in zip(old, sampler, mask, strict=True)
        ]
        if options["mode"].startswith("sequence"):
            gaps = [math.fsum(gaps)]
        ratios = [math.exp(gap) for gap in gaps]
        if options["mode"].endswith("truncate"):
            results.append([min(max(ratio, low), high) for ratio in ratios])
        else:
            results.append([ratio if low <= ratio <= high else 0.0 for ratio in ratios])
    return results


def advantages(options, rewards, weights):
    """From one reward a row and function, None where it was not scored; groups are consecutive rows."""
    size = options["num_generations"]
    if options["multi_objective_aggregation"] == "normalize_then_sum":
        parts = [
            [None if r is None else w * r for r, w in zip(row, weights, strict=True)]
            for row in _columns_normalised(rewards, size)
        ]
        return _zero_if_none(_standardised(_sums(parts, rewards), len(rewards), scale="batch", size=len(rewards)))
    weighted = [[None if r is None else w * r for r, w in zip(row, weights, strict=True)] for row in rewards]
    return _zero_if_none(_standardised(_sums(weighted, rewards), len(rewards), options["scale_rewards"], size))


def _sums(parts, rewards):
    return [
        None if all(r is None for r in row) else math.fsum(p for p in part if p is not None)
        for part, row in zip(parts, rewards, strict=True)
    ]


def _columns_normalised(rewards, size):
    columns = [_standardised(list(column), len(rewards), "group", size) for column in zip(*rewards, strict=True)]
    return [list(row) for row in zip(*columns, strict=True)]


def _standardised(values, number, scale, size):
    """(v - mean of its group) / (deviation + 1e-4); None where there is none, or one value has no deviation."""
    results = []
    for start in range(0, number, size):
        group = values[start : start + size]
        known = [v for v in group if v is not None]
        spread = _deviation([v for v in values if v is not None] if scale == "batch" else known)
        for v in group:
            if v is None or (scale != "none" and spread is None):
                results.append(None)
            else:
                results.append((v - math.fsum(known) / len(known)) / (1.0 if scale == "none" else spread + 1e-4))
    return results


def _deviation(values):
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


def _zero_if_none(values):
    return [0.0 if v is None else v for v in values]
