"""Random batches as other systems hold them: rectangles or packed rows, next-token aligned, garbage under the mask."""

import numpy as np


def rectangle(seed, *, rows=4, width=6, empty=True, spread=0.3):
    """[B, T] log-probabilities of four policies, an advantage a row, a mask with a full, a short and an empty row."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, width, rows)
    lengths[0], lengths[1] = width, 1
    if empty:
        lengths[2] = 0
    mask = (np.arange(width) < lengths[:, None]) & ((rng.random((rows, width)) < 0.8) | (np.arange(width) == 0))
    old = -rng.gamma(2.0, 0.7, (rows, width)) - 0.01
    near = {
        name: np.minimum(old + spread * rng.standard_normal((rows, width)), -1e-3)
        for name in ("logprobs", "ref_logprobs", "rollout_logprobs")
    }
    arrays = {"old_logprobs": old, **near}
    for values in arrays.values():
        values[~mask] = -9.0 * rng.random((~mask).sum())
    advantages = np.repeat(rng.standard_normal((rows, 1)), width, axis=1)
    advantages[-1] = 0.0
    return {**arrays, "advantages": advantages, "mask": mask.astype(np.float64)}


def packed(seed, *, lengths=(6, 1, 4, 3, 5), spread=0.3):
    """The same on a flat row of documents, of which the third does not train."""
    rng = np.random.default_rng(seed)
    index = np.repeat(np.arange(len(lengths)), lengths)
    mask = rng.random(len(index)) < 0.75
    for document in range(len(lengths)):
        mask[np.flatnonzero(index == document)[0]] = True
    mask[index == 2] = False
    old = -rng.gamma(2.0, 0.7, len(index)) - 0.01
    near = {
        name: np.minimum(old + spread * rng.standard_normal(len(index)), -1e-3)
        for name in ("logprobs", "ref_logprobs", "rollout_logprobs")
    }
    advantages = rng.standard_normal(len(lengths))
    advantages[1] = 0.0
    return {
        "old_logprobs": old,
        **near,
        "advantages": advantages[index],
        "mask": mask.astype(np.float64),
        "document_index": index,
    }


def with_logits(batch, seed, *, vocabulary=9, spread=0.3, trained="targets"):
    """The same batch with logits in place of log-probabilities; the other policies stay near what the logits say.

    Args:
        batch: from `rectangle` or `packed`.
        seed: of the logits.
        vocabulary: V.
        spread: nats between the policies.
        trained: "targets" makes targets negative where nothing trains and drops the mask, "mask" keeps both.
    """
    rng = np.random.default_rng(seed + 1000)
    shape = batch["mask"].shape
    logits = 1.5 * rng.standard_normal((*shape, vocabulary))
    targets = rng.integers(0, vocabulary, shape)
    output = np.take_along_axis(logits, targets[..., None], -1)[..., 0] - np.log(np.exp(logits).sum(-1))
    results = {name: value for name, value in batch.items() if name != "logprobs"}
    for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs"):
        results[name] = np.minimum(output + spread * rng.standard_normal(shape), -1e-3)
    if trained == "targets":
        targets = np.where(batch["mask"] > 0, targets, -100)
        del results["mask"]
    return {**results, "logits": logits, "targets": targets}


def close(found, expected, bar=1e-9):
    """True if two arrays are equal element by element, NaN like NaN."""
    found, expected = np.asarray(found, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    if found.shape != expected.shape:
        return False
    with np.errstate(invalid="ignore"):
        near = np.abs(found - expected) <= bar * np.maximum(1, np.abs(expected))
    return bool((near | (found == expected) | (np.isnan(found) & np.isnan(expected))).all())


def differing(found, expected, leave_out=()):
    """Names of outputs and metrics in which a replay differs from an oracle; metrics that it adds do not count."""
    wrong = [
        name for name in expected if name not in ("metrics", *leave_out) and not close(found[name], expected[name])
    ]
    metrics = expected.get("metrics", {})
    return wrong + [
        f"{name}: {found['metrics'].get(name)} is not {value}"
        for name, value in metrics.items()
        if name not in leave_out and not close(found["metrics"].get(name, np.nan), value)
    ]
