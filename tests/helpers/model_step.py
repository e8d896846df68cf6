"""A step of the tiny model, whose log-probabilities and gradient come from the stock decoder, a document at a time."""

import functools

import torch

from workbench.dumps.step import StepDump
from workbench.policy.decoder import load_decoder
from workbench.policy.precision import lift_to_float64

MODEL, TEMPERATURE, CLIP = "tiny-qwen3", 0.8, 0.2
PROMPTS, LENGTHS = (2, 3, 1, 4), (5, 3, 6, 4)
ADVANTAGES = (1.0, -1.0, 0.5, -0.5)


def documents(seed=0):
    """Return prompts and completions, token ids of each document."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(length):
        return torch.randint(0, 19, (length,), generator=generator)

    return [drawn(n) for n in PROMPTS], [drawn(n) for n in LENGTHS]


@functools.cache
def stock(seed=0):
    """Return the decoder in float64."""
    return lift_to_float64(load_decoder(MODEL, seed=seed)).eval()


@torch.enable_grad()
def logprobs(prompts, completions, *, temperature=TEMPERATURE, seed=0, over=1.0):
    """Return [n] log-probabilities of each completion's tokens, with a gradient."""
    values = []
    for prompt, completion in zip(prompts, completions, strict=True):
        logits = stock(seed)(input_ids=torch.cat([prompt, completion])[None]).logits[0] / temperature
        rows = logits[len(prompt) - 1 : -1].log_softmax(-1) / over
        values.append(rows.gather(1, completion[:, None])[:, 0])
    return values


def mask():
    """Return [T] bool: all train but a tool's tokens, the second of document 2 and the last of document 3."""
    trains = torch.ones(sum(LENGTHS), dtype=torch.bool)
    trains[sum(LENGTHS[:2]) + 1] = False
    trains[-1] = False
    return trains


@torch.enable_grad()
def dump(*, ids_seed=0, recorded=None, old=None, factor=1.0, gradients=True, **more):
    """Return a step of PPO's clip over its trained tokens, with the gradient of its loss times a factor."""
    prompts, completions = documents(ids_seed)
    policy = torch.cat(logprobs(prompts, completions))
    trains, document_ids = mask(), torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))
    generator = torch.Generator().manual_seed(5)
    noise = 0.3 * torch.randn(len(policy), generator=generator, dtype=torch.float64)
    old = policy.detach() + noise if old is None else old
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)[document_ids]
    ratio = (policy - old).exp()
    value = -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    loss = value[trains].sum() / trains.sum()
    names, parameters = zip(*stock(0).named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    made = {n: factor * g for n, g in zip(names, found, strict=True) if g is not None}
    norm = sum(float(g.square().sum()) for g in made.values()) ** 0.5
    tokens = {
        "loss_mask": trains,
        "token_ids": torch.cat(completions),
        "policy_logprobs": policy.detach() if recorded is None else recorded,
        "old_logprobs": old,
        "advantages": advantages,
    }
    given = {
        "settings": {"name": "ppo", "denominator": "token"},
        "dtype": "float64",
        "temperature": TEMPERATURE,
        "losses": {"total": float(loss.detach())} if recorded is None else {},
        "gradients": made if gradients else {},
        "gradient_norm": norm if gradients else None,
        "ids": {"prompt_ids": prompts},
    }
    return StepDump(document_ids, tokens, **{**given, **more})
