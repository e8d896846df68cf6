"""Weights of token losses, written from the published formulas, one document at a time.

Sources, with m_it the mask, L_i = sum_t m_it, and everything counted over the whole optimizer step:
token 1/sum_i L_i: DAPO, arXiv 2503.14476, equation 8. document 1/(N L_i): DeepSeekMath, arXiv 2402.03300, equation 3.
document_sum 1/N: LUSPO and GSPO with a sum over tokens. constant 1/(N C): Dr. GRPO, arXiv 2503.20783.
prompt_group 1/(P T_g): SkyRL `prompt_mean`. rollout 1/(R T_r): slime `rollout_mask_sums`. group_length 1/mean tokens of
the group, prompts included: PipelineRL `group_normalization`. raw 1: Tinker. local_token 1/(B T_b): TRL `bnpo`.
"""

from __future__ import annotations


def document_weight(
    documents, number, denominator, *, constant=None, documents_counted="trained", kept=None, rows=None
):
    """Return the weight of each trained token of one document.

    Args:
        documents: dicts with tokens, loss_mask and, where needed, group_id, rollout_id, reward.
        number: which of them.
        denominator: by name.
        constant: C.
        documents_counted: "trained" or "all".
        kept: per document, per token, whether it survives a correction; None: all do.
        rows: per document, the row that holds it (for local_token), rows counted from 0; as (rows, how many).
    """

    def counted(other):
        document = documents[other]
        return sum(1 for t, trains in enumerate(document["loss_mask"]) if trains and (kept is None or kept[other][t]))

    everyone = range(len(documents))
    alive = [d for d in everyone if documents_counted == "all" or counted(d) > 0]

    def with_same(key):
        return [d for d in everyone if documents[d][key] == documents[number][key]]

    if denominator == "token":
        divisor = sum(counted(d) for d in everyone)
    elif denominator == "document":
        divisor = len(alive) * counted(number)
    elif denominator == "document_sum":
        divisor = len(alive)
    elif denominator == "constant":
        divisor = len(alive) * constant
    elif denominator in ("prompt_group", "rollout"):
        key = "group_id" if denominator == "prompt_group" else "rollout_id"
        sets = {documents[d][key] for d in alive}
        divisor = len(sets) * sum(counted(d) for d in with_same(key))
    elif denominator == "group_length":
        lengths = [len(documents[d]["tokens"]) for d in with_same("group_id") if d in alive]
        divisor = sum(lengths) / len(lengths) if lengths else 0
    elif denominator == "raw":
        divisor = 1
    elif denominator == "local_token":
        place, how_many = rows
        divisor = how_many * sum(counted(d) for d in everyone if place[d] == place[number])
    elif denominator == "positive_token":
        if not documents[number]["reward"] > 0:
            return 0.0
        divisor = sum(counted(d) for d in everyone if documents[d]["reward"] > 0)
    else:
        raise ValueError(denominator)
    return 1 / divisor if divisor else 0.0


def gradient_weight(documents, number, denominator, *, gradient_divisor=1.0, normalize_by_documents=False, **settings):
    """The same for the gradient: divided once more by a constant, or by the number of documents of the step.

    Source: DeepSpeed divides a gradient, and not the loss, by accumulation steps times ranks; a Fast-LLM branch copied
    that as gradient / M**2 with loss / M (ServiceNow/Fast-LLM#502).
    """
    weight = document_weight(documents, number, denominator, **settings) / gradient_divisor
    if normalize_by_documents:
        alive = [d for d in documents if settings.get("documents_counted") == "all" or any(d["loss_mask"])]
        weight /= len(alive) or 1
    return weight
