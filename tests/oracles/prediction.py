"""The loss of layers that predict further tokens, one document at a time, each depth written out.

Source: DeepSeek-V3, arXiv 2412.19437, section 2.2, equations 21 to 25; the hidden states that a depth reads are
behind a norm, of the decoder or of the depth before, and the embedding comes first, as in `transformers`' MtpModel.
"""

from __future__ import annotations

import torch


def normed(norm, x):
    """x / rms(x) * weight."""
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + norm.epsilon) * norm.weight


def prediction_step(model, documents, layers, *, coefficient, detach="nothing"):
    """Loss of each depth, coefficient included, and every gradient of their sum.

    Args:
        model: from `step.exact`, with the layers among its parameters.
        documents: dicts of lists: tokens, loss_mask.
        layers: one for each depth, with enorm, hnorm, eh_proj, mtp_block and post_norm.
        detach: "nothing", "hidden_states" of the decoder, or "policy": also its embedding and head.
    """
    model.zero_grad(set_to_none=True)
    depths = len(layers)
    counts = [sum(sum(document["loss_mask"][k + 1 :]) for document in documents) for k in range(1, depths + 1)]
    sums = [torch.zeros((), dtype=torch.float64) for _ in layers]
    table, head = model.model.embed_tokens.weight, model.lm_head.weight
    if detach == "policy":
        table, head = table.detach(), head.detach()
    for document in documents:
        tokens = document["tokens"]
        hidden = model.model(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
        if detach != "nothing":
            hidden = hidden.detach()
        for k, layer in enumerate(layers, 1):
            length = len(tokens) - k  # positions whose token k ahead exists
            if length < 1:
                break
            ahead = torch.stack([table[tokens[i + k]] for i in range(length)])
            mixed = torch.cat([normed(layer.enorm, ahead), normed(layer.hnorm, hidden[:length])], dim=1)
            mixed = (mixed @ layer.eh_proj.weight.T)[None]
            places = torch.arange(length)[None]
            output = layer.mtp_block(
                mixed,
                attention_mask=None,
                position_ids=places,
                position_embeddings=model.model.rotary_emb(mixed, places),
            )
            hidden = normed(layer.post_norm, output[0])
            for i in range(length - 1):
                if document["loss_mask"][i + k + 1]:
                    scores = head @ hidden[i]
                    value = torch.logsumexp(scores, dim=0) - scores[tokens[i + k + 1]]
                    sums[k - 1] = sums[k - 1] + coefficient / depths / counts[k - 1] * value
    sum(sums).backward()
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }
    return [value.item() for value in sums], gradients
