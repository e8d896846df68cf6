"""verl's losses, token by token in plain floats, from the formulas of its functions (1dda039b).

Arrays are rectangles: a row is a sequence. Slopes are written out, not differentiated. ``single`` rounds shares of
sequences to single precision, as means of flags are in verl's losses.
"""

import math

import numpy as np

TINY = 1e-8
FAR = 20.0


def held(value, bound=FAR):
    return max(-bound, min(bound, value))


def tokens(mask):
    return [(i, t) for i in range(mask.shape[0]) for t in range(mask.shape[1]) if mask[i, t] > 0]


def mean(values):
    return sum(values) / (len(values) + TINY)


# ---- one number of many ------------------------------------------------------------------------------------------


def weights(mode, mask, info):
    """Return the factor [B, T] of a token's value; ``mask`` may be smaller than the batch's."""
    dp, count, lengths = info.get("dp_size", 1), info.get("batch_num_tokens"), mask.sum(1)
    rows = info.get("global_batch_size") or max((lengths > 0).sum(), 1)
    out = np.zeros(mask.shape)
    for i, t in tokens(mask):
        out[i, t] = (
            dp
            * {
                "token-mean": 1 / (count or mask.sum()),
                "token-sum": 1.0,
                "seq-mean-token-sum": 1 / rows,
                "seq-mean-token-sum-norm": 1 / (rows * (info.get("loss_scale_factor") or mask.shape[1])),
                "seq-mean-token-mean": 1 / (rows * (lengths[i] + TINY)),
            }[mode]
        )
    return out


def is_mean_over_nothing(mode, mask, info):
    """agg_loss divides by its own count, without a guard: 0 / 0, unless the count was given."""
    count = {"token-mean": info.get("batch_num_tokens"), "token-sum": 1}.get(mode, info.get("global_batch_size"))
    return count is None and not mask.any()


def aggregation(config, batch):
    w = weights(config["loss_agg_mode"], batch["mask"], config)
    return {"loss": float((np.where(w != 0, batch["values"], 0) * w).sum()), "grad_values": w, "metrics": {}}


# ---- policy losses -----------------------------------------------------------------------------------------------


def point(mode, c, x, o, a):
    """(value, slope, clipped, clipped at the second bound) of a token with its own ratio."""
    d = held(x - o)
    r, free, low, high = math.exp(d), abs(x - o) <= FAR, c["low"], c["high"]
    if mode == "vanilla":
        top = 1 + high if a > 0 else c["clip_ratio_c"] if a < 0 else math.inf
        bottom = 1 - low if a < 0 else -math.inf
        cut = r > 1 + high if a > 0 else r < 1 - low if a < 0 else False
        return -a * min(max(r, bottom), top), -a * r * (bottom <= r <= top) * free, cut, a < 0 and r > c["clip_ratio_c"]
    if mode == "sapo":
        tau = c["tau_pos"] if a > 0 else c["tau_neg"]
        gate = 1 / (1 + math.exp(-min(tau * (r - 1), 700)))
        return -a * gate * 4 / tau, -a * 4 * gate * (1 - gate) * r * free, False, False
    if mode == "cispo":
        kept = min(max(r, 1 - low), 1 + high)
        return -a * kept * x, -a * kept, kept != r, False
    if mode in ("dppo_tv", "dppo_kl"):
        p, q = math.exp(x), math.exp(o)
        moved, up = p - q, a > 0
        if mode == "dppo_kl":
            far = q * (o - x) + (1 - q) * math.log((1 - q + TINY) / (1 - p + TINY))
            out = far > (high if up else low) and (moved > 0 if up else moved < 0)
        else:
            out = moved > high if up else moved < -low
        kept = 0.0 if out else min(r, c["clip_ratio_c"])
        return -a * kept * x, -a * kept, out, r > c["clip_ratio_c"] and not out
    if mode == "dro":
        return -(a * x - c["dro_beta"] / 2 * (x - o) ** 2), -a + c["dro_beta"] * (x - o), False, False
    return -a * x, -a, False, False  # gpg, reinforce


def policy_loss(mode, config, batch):
    """``mode``: name in the registry."""
    own, info = config.get("policy_loss") or {}, config.get("global_batch_info") or {}
    c = {
        "clip_ratio_c": 3.0,
        "tau_pos": 1.0,
        "tau_neg": 1.05,
        "clip_ratio": 0.2,
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.2,
        **config,
        **own,
    }
    c["low"] = c["clip_ratio"] if c["clip_ratio_low"] is None else c["clip_ratio_low"]
    c["high"] = c["clip_ratio"] if c["clip_ratio_high"] is None else c["clip_ratio_high"]
    x, a, mask = batch["logprobs"], batch["advantages"], batch["mask"]
    o = batch["rollout_logprobs"] if mode == "reinforce" else batch["old_logprobs"]
    given = batch.get("is_weights")
    special = {"gspo": _gspo, "geo_mean": _geo_mean, "clip_cov": _clip_cov, "kl_cov": _kl_cov}.get(mode)
    if special is not None:
        return special(c, info, x, o, a, mask, given)
    results = {at: point(mode, c, x[at], o[at], a[at]) for at in tokens(mask)}
    by = "seq-mean-token-mean" if mode == "sapo" else c.get("loss_agg_mode", "token-mean")
    bounded = mode not in ("dro", "reinforce")
    metrics = (
        {}
        if mode == "gpg"
        else {"actor/ppo_kl": mean([held(o[at] - x[at]) if bounded else o[at] - x[at] for at in results])}
    )
    if mode not in ("gpg", "dro", "reinforce"):
        metrics |= {
            "actor/pg_clipfrac": mean([f[2] for f in results.values()]),
            "actor/pg_clipfrac_lower": mean([f[3] for f in results.values()]),
        }
    return _summed(results, weights(by, mask, info), given, mask.shape, metrics)


def _summed(found, w, given, shape, metrics):
    loss, slope = 0.0, np.zeros(shape)
    for at, (value, derivative, *_) in found.items():
        share = w[at] * (1.0 if given is None else given[at])
        loss += share * value
        slope[at] = share * derivative
    return {"loss": loss, "grad_logprobs": slope, "metrics": metrics}


def _gspo(c, info, x, o, a, mask, given):
    result, cuts = {}, []
    for i in range(len(x)):
        own = [at for at in tokens(mask) if at[0] == i]
        s = sum(x[at] - o[at] for at in own) / max(len(own), 1)
        r = math.exp(min(s, 10.0))
        for at in own:
            value, derivative = -a[at] * r, -a[at] * r * (s <= 10.0)
            cut = r > 1 + c["high"] if a[at] > 0 else r < 1 - c["low"] if a[at] < 0 else False
            if cut:
                value, derivative = -a[at] * (1 + c["high"] if a[at] > 0 else 1 - c["low"]), 0.0
            cuts.append(cut)
            result[at] = (value, derivative)
    metrics = {
        "actor/pg_clipfrac": mean(cuts),
        "actor/pg_clipfrac_lower": 0.0,
        "actor/ppo_kl": mean([o[at] - x[at] for at in tokens(mask)]),
    }
    return _summed(result, weights(c.get("loss_agg_mode", "token-mean"), mask, info), given, mask.shape, metrics)


def _geo_mean(c, info, x, o, a, mask, given):
    loss, slope, sides = 0.0, np.zeros(mask.shape), {1: [], -1: []}
    for i in range(len(x)):
        own = [at for at in tokens(mask) if at[0] == i]
        count = len(own) + TINY
        bent, open_ = [], []
        for at in own:
            d, sign = x[at] - o[at], np.sign(a[at])
            bound = min(max(d, -c["low"]), c["high"])
            worse = sign * min(sign * d, sign * bound)
            bent.append(worse)
            open_.append(sign != 0 and worse == d)
            for side in sides:
                sides[side].append(d != bound and sign == side)
        ratio, advantage = math.exp(sum(bent) / count), sum(a[at] for at in own) / count
        weight = 1.0 if given is None else math.exp(sum(math.log(given[at] + 1e-10) for at in own) / count)
        loss += -advantage * ratio * weight / len(x)
        for at, free in zip(own, open_, strict=True):
            slope[at] = -advantage * ratio * weight / len(x) / count * free
    metrics = {
        "actor/pg_clipfrac": mean(sides[1]),
        "actor/pg_clipfrac_lower": mean(sides[-1]),
        "actor/ppo_kl": mean([o[at] - x[at] for at in tokens(mask)]),
    }
    return {"loss": loss, "grad_logprobs": slope, "metrics": metrics}


def _covariances(x, a, mask):
    own = tokens(mask)
    middle_a, middle_x = (sum(v[at] for at in own) / len(own) for v in (a, x))
    return {at: (a[at] - middle_a) * (x[at] - middle_x) for at in own}


def _clip_cov(c, info, x, o, a, mask, given):
    """The share must be 1: verl draws a smaller one at random."""
    result, chosen = {}, []
    for at, cov in _covariances(x, a, mask).items():
        r = math.exp(x[at] - o[at])
        top, bottom = (1 + c["high"], -math.inf) if a[at] > 0 else (math.inf, 1 - c["low"])
        cut = a[at] != 0 and not bottom <= r <= top
        selected = not cut and c["clip_cov_lb"] < cov < c["clip_cov_ub"]
        chosen.append(selected)
        value, slope = -a[at] * min(max(r, bottom), top), 0.0 if cut else -a[at] * r
        result[at] = (0.0, 0.0) if selected else (value, slope)
    metrics = {"actor/pg_clipfrac": mean(chosen), "actor/ppo_kl": mean([o[at] - x[at] for at in result])}
    return _summed(result, weights(c["loss_agg_mode"], mask, info), given, mask.shape, metrics)


def _kl_cov(c, info, x, o, a, mask, given):
    cov = _covariances(x, a, mask)
    greatest = sorted(cov, key=lambda at: -cov[at])[: max(1, int(len(cov) * c["kl_cov_ratio"]))]
    coefficient = 1.0 if c["ppo_kl_coef"] is None else c["ppo_kl_coef"]
    results = {}
    for at in cov:
        d, pull = x[at] - o[at], coefficient * (at in greatest)
        results[at] = (-a[at] * math.exp(d) + pull * abs(d), -a[at] * math.exp(d) + pull * np.sign(d))
    metrics = {"actor/ppo_kl": mean([abs(x[at] - o[at]) for at in cov])}
    return _summed(results, weights(c["loss_agg_mode"], mask, info), given, mask.shape, metrics)


def bypass(config, batch):
    """bypass_mode: the correction looks at the live policy."""
    settings, info = config["rollout_correction"], config.get("global_batch_info") or {}
    kept, w, metrics = rollout_correction(
        settings, batch["logprobs"], batch["rollout_logprobs"], batch["mask"], single=True
    )
    agg = {"loss_agg_mode": config["loss_agg_mode"], "global_batch_info": info}
    smaller = {**batch, "mask": kept, "old_logprobs": batch["rollout_logprobs"]}
    if settings["loss_type"] == "ppo_clip":
        result = policy_loss("vanilla", agg, smaller)
    else:
        result = policy_loss("reinforce", agg, smaller if w is None else {**smaller, "is_weights": w})
    if is_mean_over_nothing(config["loss_agg_mode"], kept, info):
        result = result | {"loss": math.nan}
    return result | {"metrics": result["metrics"] | metrics}


# ---- rollout correction ------------------------------------------------------------------------------------------


def limits(said):
    numbers = [float(part) for part in str(said).strip().split("_")]
    return (None, numbers[0]) if len(numbers) == 1 else tuple(numbers)


def rollout_correction(settings, old, rollout, mask, *, single=False):
    """(mask that is left, weights or None, metrics)."""
    gap = np.where(mask > 0, old - rollout, 0.0)
    metrics = _apart(old, rollout, gap, mask)
    w, left = None, mask.copy()
    if settings.get("rollout_is") and settings.get("rollout_is_threshold", 2.0) is not None:
        w, more = _importance(settings, gap, mask, single)
        metrics |= more
    if settings.get("rollout_rs"):
        left, more = _rejection(settings, gap, mask, single)
        metrics |= more
    return left, w, {f"rollout_corr/{name}": value for name, value in metrics.items()}


def is_correction(settings, batch):
    kept, w, metrics = rollout_correction(settings, batch["old_logprobs"], batch["rollout_logprobs"], batch["mask"])
    return {"mask": kept, "metrics": metrics} | ({} if w is None else {"is_weights": w})


def row_means(values, mask):
    return [
        sum(values[i, t] for t in range(mask.shape[1]) if mask[i, t] > 0) / (mask[i].sum() + TINY)
        for i in range(len(mask))
    ]


def plain(values):
    return sum(values) / len(values)


def share(flags, single):
    return float(np.float32(plain(flags))) if single else plain(flags)


def spread(values):
    if len(values) < 2:
        return 0.0
    middle = plain(values)
    return math.sqrt(sum((v - middle) ** 2 for v in values) / (len(values) - 1))


def around(values):
    """Deviation as a difference of two means; 0 for one token."""
    return math.sqrt(max(mean([v * v for v in values]) - mean(values) ** 2, 0)) if len(values) > 1 else 0.0


def _apart(old, rollout, gap, mask):
    own = tokens(mask)
    mine, theirs = row_means(old, mask), row_means(rollout, mask)
    between = [s - o for o, s in zip(mine, theirs, strict=True)]
    return {
        "kl": mean([-gap[at] for at in own]),
        "k3_kl": mean([math.exp(gap[at]) - gap[at] - 1 for at in own]),
        "training_ppl": plain([math.exp(-v) for v in mine]),
        "training_log_ppl": plain([-v for v in mine]),
        "rollout_ppl": plain([math.exp(-v) for v in theirs]),
        "rollout_log_ppl": plain([-v for v in theirs]),
        "log_ppl_diff": plain(between),
        "log_ppl_abs_diff": plain([abs(v) for v in between]),
        "log_ppl_diff_max": max(between),
        "log_ppl_diff_min": min(between),
        "ppl_ratio": plain([math.exp(v) for v in between]),
        "chi2_token": mean([math.exp(2 * held(gap[at])) for at in own]) - 1,
        "chi2_seq": plain([math.exp(2 * held(row.sum())) for row in gap]) - 1,
    }


def _importance(settings, gap, mask, single):
    low, high = limits(settings.get("rollout_is_threshold", 2.0))
    own, sums = tokens(mask), gap.sum(1)
    raw, bounded = np.zeros(mask.shape), np.zeros(mask.shape)
    for at in own:
        raw[at] = math.exp(held(gap[at] if settings["rollout_is"] == "token" else sums[at[0]]))
        bounded[at] = min(raw[at], high) if low is None else raw[at] * (low <= raw[at] <= high)
    floor, kept = 1 / high if low is None else low, [bounded[at] for at in own]
    mine, before = row_means(bounded, mask), row_means(raw, mask)
    metrics = {
        "mean": mean(kept),
        "std": around(kept),
        "seq_mean": plain(mine),
        "seq_std": spread(mine),
        "seq_max": max(mine),
        "seq_min": min(mine),
        "seq_max_deviation": max(abs(v - 1) for v in mine),
        "seq_fraction_high": share([v > high for v in before], single),
        "seq_fraction_low": share([v < floor for v in before], single),
        "eff_sample_size": 1 / (mean([(v / (mean(kept) + TINY)) ** 2 for v in kept]) or math.nan),
    }
    if settings["rollout_is"] == "token":
        metrics |= {
            "max": max(kept),
            "min": min(kept),
            "ratio_fraction_high": mean([raw[at] > high for at in own]),
            "ratio_fraction_low": mean([raw[at] < floor for at in own]),
        }
    else:
        metrics |= {
            "max": math.exp(min(max(sums), FAR)),
            "min": math.exp(min(sums)),
            "ratio_fraction_high": share([v > math.log(high) for v in sums], single),
            "ratio_fraction_low": share([v < math.log(floor) for v in sums], single),
        }
    if low is not None:
        metrics["oob_ratio"] = mean([not low <= raw[at] <= high for at in own])
    if settings.get("rollout_is_batch_normalize"):
        filled = [v for v, row in zip(mine, mask, strict=True) if row.sum()]
        factor = mean(kept) if settings["rollout_is"] == "token" else plain(filled)
        factor = factor if factor > TINY else 1.0
        metrics["batch_norm_factor"] = factor
        bounded = bounded / factor
    return bounded, {f"rollout_is_{name}": value for name, value in metrics.items()}


def _rejection(settings, gap, mask, single):
    options = list(dict.fromkeys(part.strip() for part in settings["rollout_rs"].split(",")))
    text = str(settings["rollout_rs_threshold"]).split(",")
    own, left, metrics = tokens(mask), mask.copy(), {}
    rows = [i for i in range(len(mask)) if mask[i].sum()]
    for option, threshold in zip(options, text * len(options) if len(text) == 1 else text, strict=True):
        level, kind = option.rsplit("_", 1)
        low, high = limits(threshold)
        if kind == "k1":
            low, high = math.log(1 / high if low is None else low), math.log(high)
        stat = {
            at: {"k1": -held(gap[at]), "k2": held(gap[at]) ** 2 / 2, "k3": math.exp(held(gap[at])) - held(gap[at]) - 1}[
                kind
            ]
            for at in own
        }
        each = {i: [stat[at] for at in own if at[0] == i] for i in rows}
        whole = {i: {"token": mean, "seq_mean": mean, "seq_sum": sum, "seq_max": max}[level](each[i]) for i in rows}
        value = stat if level == "token" else {at: whole[at[0]] for at in own}
        out = {at: value[at] > high or (kind == "k1" and value[at] < low) for at in own}
        for at in own:
            left[at] *= not out[at]
        seen = list(value.values()) if level == "token" else list(whole.values())
        beyond = (lambda flags: mean(flags)) if level == "token" else (lambda flags: share(flags, single))
        bottom, sequences = low if kind == "k1" else 0.0, list(whole.values())
        results = {
            "mean": mean(list(value.values())),
            "max": max(seen),
            "min": min(seen),
            "fraction_high": beyond([v > high for v in seen]),
            "fraction_low": beyond([v < low for v in seen]) if kind == "k1" else 0.0,
            "std": around([min(max(v, bottom), high) for v in value.values()]),
            "seq_mean": plain(sequences),
            "seq_std": spread(sequences),
            "seq_max": max(sequences),
            "seq_min": min(sequences),
            "seq_max_deviation": max(abs(v) for v in sequences),
            "seq_fraction_high": share([v > high for v in sequences], single),
            "masked_fraction": mean(list(out.values())),
            "seq_masked_fraction": plain([any(out[at] for at in own if at[0] == i) for i in rows]),
        }
        if kind == "k1":
            results["seq_fraction_low"] = share([v < low for v in sequences], single)
        metrics |= {f"rollout_rs_{option}_{name}": number for name, number in results.items()}
    metrics["rollout_rs_masked_fraction"] = mean([left[at] == 0 for at in own])
    metrics["rollout_rs_seq_masked_fraction"] = share([left[i].sum() < mask[i].sum() for i in range(len(mask))], single)
    return left, metrics


# ---- KL, critic --------------------------------------------------------------------------------------------------


def kl_estimator(config, batch):
    name, x, f = config["kl_penalty"], batch["logprobs"], batch["ref_logprobs"]
    base, kl, slope = name.removesuffix("+"), np.zeros(x.shape), np.zeros(x.shape)
    for at in np.ndindex(*x.shape):
        d = x[at] - f[at]
        if base in ("kl", "k1"):
            kl[at], slope[at] = d, 1.0
        elif base == "abs":
            kl[at], slope[at] = abs(d), np.sign(d)
        elif base in ("mse", "k2"):
            kl[at], slope[at] = d * d / 2, d
        else:
            u = held(-d)
            value = math.exp(u) - u - 1
            kl[at], slope[at] = held(value, 10.0), (1 - math.exp(u)) * (u == -d) * (abs(value) <= 10)
        slope[at] = d if name.endswith("+") else slope[at]
    w = weights(config["loss_agg_mode"], batch["mask"], config)
    return {"loss": float((kl * w).sum()), "grad_logprobs": slope * w, "kl": kl, "metrics": {}}


def value_loss(config, batch):
    v, old, target, clip = (batch["values"], batch["old_values"], batch["returns"], config["cliprange_value"])
    w = weights(config["loss_agg_mode"], batch["mask"], config)
    loss, slope, clipped = 0.0, np.zeros(v.shape), []
    for at in tokens(batch["mask"]):
        near = old[at] + held(v[at] - old[at], clip)
        one, two = (v[at] - target[at]) ** 2, (near - target[at]) ** 2
        clipped.append(two > one)
        loss += w[at] * max(one, two) / 2
        slope[at] = w[at] * (v[at] - target[at]) * (two <= one or near == v[at])
    return {"loss": loss, "grad_values": slope, "metrics": {"vf_clipfrac": mean(clipped)}}


# ---- advantages --------------------------------------------------------------------------------------------------


def advantage(name, config, batch):
    """``name``: in the registry of estimators. Returns are the advantages but for estimators on tokens."""
    mask, earned = batch["mask"], batch["token_rewards"]
    on_tokens = {
        "gae": _gae,
        "reinforce_plus_plus": _discounted,
        "remax": _remax,
        "optimal_token_baseline": _otb,
        "tir_optimal_token_baseline": _otb,
    }.get(name)
    if on_tokens is not None:
        advantages, returns = on_tokens(name, config, batch)
        return {"advantages": advantages, "returns": returns, "metrics": {}}
    rewards, groups = earned.sum(1), batch["group_ids"]
    out = np.zeros(len(rewards))
    for i, r in enumerate(rewards):
        mine = [j for j in range(len(rewards)) if groups[j] == groups[i]]
        own = [rewards[j] for j in mine]
        out[i] = _of_group(name, config, i, r, mine, own, rewards, mask)
    spread_out = out[:, None] * mask
    if name in ("reinforce_plus_plus_baseline", "gdpo"):
        spread_out = whitened(spread_out, mask) * mask
    return {"advantages": spread_out, "returns": spread_out, "metrics": {}}


def _of_group(name, config, i, r, mine, own, rewards, mask):
    n, middle = len(own), plain(own)
    divided = config.get("norm_adv_by_std_in_grpo", True)
    if name in ("grpo", "grpo_vectorized", "gdpo"):
        middle, deviation = (middle, spread(own)) if n > 1 else (0.0, 1.0)
        return (r - middle) / (deviation + 1e-6) if divided else r - middle
    if name == "grpo_passk":
        second, best = sorted(own)[-2:]
        return (r == best) * (best - second) / (spread(own) + 1e-6 if divided else 1.0)
    if name == "rloo_vectorized":
        return (r - middle) * n / (n - 1) if n > 1 else 0.0
    if n == 1:
        middle = 0.0
    if name == "rloo":
        return (r - middle) * n / (n - 1) if n > 1 else r
    if name == "opo":
        lengths = [mask[j].sum() for j in mine]
        return r - sum(length * v for length, v in zip(lengths, own, strict=True)) / sum(lengths) if n > 1 else r
    if name == "gpg":
        return len(rewards) / max(sum(v != 0 for v in rewards), 1) * (r - middle) / config.get("f_norm", 1.0)
    return r - middle  # reinforce_plus_plus_baseline


def whitened(values, mask):
    own = [values[at] for at in tokens(mask)]
    middle = mean(own)
    variance = mean([(v - middle) ** 2 for v in own]) * len(own) / (len(own) - 1)
    return (values - middle) / math.sqrt(variance + TINY)


def _gae(_, config, batch):
    v, mask = batch["values"], batch["mask"]
    advantages = np.zeros(v.shape)
    for i in range(len(v)):
        after, coming = 0.0, 0.0
        for t in reversed(range(v.shape[1])):
            if mask[i, t]:
                delta = batch["token_rewards"][i, t] + config["gamma"] * after - v[i, t]
                coming, after = delta + config["gamma"] * config["lam"] * coming, v[i, t]
            advantages[i, t] = coming
    return whitened(advantages, mask), advantages + v


def _discounted(_, config, batch):
    mask, returns = batch["mask"], np.zeros(batch["mask"].shape)
    for i in range(len(mask)):
        coming = 0.0
        for t in reversed(range(mask.shape[1])):
            if mask[i, t]:
                coming = returns[i, t] = batch["token_rewards"][i, t] + config["gamma"] * coming
    return whitened(returns, mask) * mask, returns


def _to_go(batch):
    earned = batch["token_rewards"] * batch["mask"]
    return np.array([[row[t:].sum() for t in range(len(row))] for row in earned])


def _remax(_, config, batch):
    returns = _to_go(batch)
    return returns - batch["baselines"][:, None] * batch["mask"], returns


def _otb(name, config, batch):
    """Step of a token: its column, or how many trained ones stand before it in its row."""
    mask, returns = batch["mask"], _to_go(batch)
    w = batch.get("is_weights", np.ones(mask.shape))
    energy, step = np.zeros(mask.shape), {}
    for i in range(len(mask)):
        total, place = 0.0, 0
        for t in range(mask.shape[1]):
            if mask[i, t]:
                p = math.exp(batch["old_logprobs"][i, t])
                total += (1 - 2 * p + batch["sum_pi_squared"][i, t]) * w[i, t] ** 2
                step[i, t] = t if name == "optimal_token_baseline" else place
                place += 1
                energy[i, t] = total
    lengths, out = mask.sum(1), np.zeros(mask.shape)
    for (i, t), k in step.items():
        own = [
            j
            for j in range(len(mask))
            if batch["group_ids"][j] == batch["group_ids"][i] and (name == "optimal_token_baseline" or lengths[j])
        ]
        others = [lengths[j] for j in own if j != i]
        alone = not others or (config.get("handle_zero_tail", True) and k >= max(others) < lengths[i])
        at_step = [at for at, other in step.items() if other == k and at[0] in own]
        top, bottom = (
            sum(energy[at] * v for at, v in zip(at_step, values, strict=True))
            for values in ([returns[at] for at in at_step], [1.0] * len(at_step))
        )
        out[i, t] = returns[i, t] - (0.0 if alone else top / (bottom + TINY))
    return out, returns
