"""What the loops share: small models, documents, padding, packing, Muon, and the log of a run."""
import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

import workbench as wb

VOCAB, EOS, PAD, BOS = 64, 1, 0, 2
torch.set_num_threads(1)


def gen(seed):
    return torch.Generator().manual_seed(seed)


# ---------------------------------------------------------------- models
def rotate(x, positions):
    half = x.shape[-1] // 2
    freq = 1.0 / 10000 ** (torch.arange(half, dtype=torch.float32) / half)
    angle = positions[:, None, :, None].float() * freq
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Norm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * self.weight.float()).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, width, heads, rope, kernel):
        super().__init__()
        self.heads, self.rope, self.kernel = heads, rope, kernel
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x, positions, allowed):
        b, t, w = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        if self.rope:
            q, k = rotate(q, positions), rotate(k, positions)
        if self.kernel == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        else:
            scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
            scores = scores.float().masked_fill(~allowed, -1e9)
            y = scores.softmax(-1).to(v.dtype) @ v
        return self.out(y.transpose(1, 2).reshape(b, t, w))


class Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Router with top-k; `told` keeps probabilities and choices of the last call for the balancing loss."""

    def __init__(self, width, experts=4, top=2, renormalize=True, router_dtype=torch.float32):
        super().__init__()
        self.top, self.renormalize, self.router_dtype = top, renormalize, router_dtype
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Mlp(width) for _ in range(experts))
        self.told = None

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            logits = F.linear(x.to(self.router_dtype), self.router.weight.to(self.router_dtype))
            probs = logits.float().softmax(-1)
        value, index = probs.topk(self.top, -1)
        if self.renormalize:
            value = value / value.sum(-1, keepdim=True)
        weight = torch.zeros_like(probs).scatter(-1, index, value)
        self.told = (probs, torch.zeros_like(probs).scatter(-1, index, 1.0))
        return sum(weight[..., i : i + 1].to(x.dtype) * e(x) for i, e in enumerate(self.experts))


class Block(nn.Module):
    def __init__(self, width, heads, rope, kernel, eps, drop, moe):
        super().__init__()
        self.norm1, self.norm2 = Norm(width, eps), Norm(width, eps)
        self.attention = Attention(width, heads, rope, kernel)
        self.mlp = Experts(width, **moe) if moe is not None else Mlp(width)
        self.drop = nn.Dropout(drop)

    def forward(self, x, positions, allowed):
        x = x + self.drop(self.attention(self.norm1(x), positions, allowed))
        return x + self.drop(self.mlp(self.norm2(x)))


class Net(nn.Module):
    """Decoder with rotary or learned positions; the mask is [rows, tokens] (padding) or [rows, 1, tokens, tokens]."""

    def __init__(self, width=32, layers=2, heads=2, rope=True, kernel="sdpa", eps=1e-6, drop=0.0, moe=None, longest=128, value=False, std=0.02):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.place = None if rope else nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, heads, rope, kernel, eps, drop, moe) for _ in range(layers))
        self.norm, self.head = Norm(width, eps), nn.Linear(width, VOCAB, bias=False)
        self.value = nn.Linear(width, 1) if value else None
        for name, p in self.named_parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=std if "embed" in name or "place" in name else 1.2 / math.sqrt(p.shape[1]))

    def forward(self, ids, positions, attention_mask):
        t = ids.shape[1]
        allowed = attention_mask
        if allowed.ndim == 2:
            allowed = allowed.bool()[:, None, None, :] & torch.ones(t, t, dtype=torch.bool).tril()
            allowed = allowed | torch.eye(t, dtype=torch.bool)
        x = self.embed(ids)
        if self.place is not None:
            x = x + self.place(positions)
        for block in self.blocks:
            x = block(x, positions, allowed)
        x = self.norm(x)
        return self.head(x) if self.value is None else (self.head(x), self.value(x)[..., 0])


def own(seed, **options):
    torch.manual_seed(seed)
    return Net(**options)


def hugging(kind, seed, kernel="sdpa", **options):
    import transformers as tf

    torch.manual_seed(seed)
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    if kind == "gpt2":
        drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **options}
        config = tf.GPT2Config(vocab_size=VOCAB, n_positions=128, n_embd=32, n_layer=2, n_head=2, initializer_range=0.15, **ids, **drop)
        cls = tf.GPT2LMHeadModel
    else:
        shape = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                     max_position_embeddings=128, initializer_range=0.15, **ids)
        config, cls = (tf.Qwen2Config, tf.Qwen2ForCausalLM) if kind == "qwen2" else (tf.LlamaConfig, tf.LlamaForCausalLM)
        config = config(**{**shape, **options})
    config._attn_implementation = kernel
    return cls(config)


def perturbed(model, std, seed):
    """A frozen copy whose matrices are a little different: an older policy, or a reference."""
    other, g = copy.deepcopy(model), gen(seed)
    with torch.no_grad():
        for p in other.parameters():
            noise = torch.randn(p.shape, generator=g)
            if p.ndim == 2:
                p.add_((std * noise).to(p.dtype))
    return other.requires_grad_(False).eval()


# ---------------------------------------------------------------- tokens
def tokens(n, g):
    return torch.randint(4, VOCAB, (n,), generator=g).tolist()


def padded(rows, side="right", extra=0, fill=0, width=None):
    """List of lists -> tensor [rows, longest + extra]."""
    longest = (width or max(len(r) for r in rows)) + extra
    kind = torch.float32 if any(isinstance(v, float) for r in rows for v in r) else torch.long
    out = torch.full((len(rows), longest), fill, dtype=kind)
    for i, r in enumerate(rows):
        if side == "right":
            out[i, : len(r)] = torch.tensor(r, dtype=kind)
        else:
            out[i, longest - len(r) :] = torch.tensor(r, dtype=kind)
    return out


def fill_rows(lengths, size):
    """First fit: which documents lie in which row."""
    rows, room = [], []
    for i, n in enumerate(lengths):
        for r, free in enumerate(room):
            if n <= free:
                rows[r].append(i)
                room[r] -= n
                break
        else:
            rows.append([i])
            room.append(size - n)
    return rows


def block_mask(documents):
    """[rows, tokens] of document numbers -> causal mask inside of documents."""
    t = documents.shape[1]
    same = (documents[:, :, None] == documents[:, None, :]) & torch.ones(t, t, dtype=torch.bool).tril()
    return same[:, None]


def gathered(logits, ids, temperature=1.0):
    """Log-probabilities and entropies of ids[:, 1:]."""
    logp = (logits[:, :-1].float() / temperature).log_softmax(-1)
    with torch.no_grad():
        entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(-1, ids[:, 1:, None])[..., 0], entropy


class Muon(torch.optim.Optimizer):
    """Momentum, then a matrix of the same singular vectors whose singular values are near 1 (five Newton-Schulz steps)."""

    def __init__(self, params, lr=0.02, momentum=0.95, nesterov=True, weight_decay=0.0, scale=True):
        super().__init__(params, dict(lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay))
        self._scaled = scale

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                g = p.grad
                state["momentum"].lerp_(g, 1 - group["momentum"])
                g = g.lerp(state["momentum"], group["momentum"]) if group["nesterov"] else state["momentum"]
                x = g.float()
                x = x / (x.norm() + 1e-7)
                tall = x.shape[0] > x.shape[1]
                x = x.T if tall else x
                for _ in range(5):
                    a = x @ x.T
                    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                x = x.T if tall else x
                scale = 0.2 * max(p.shape) ** 0.5 if self._scaled else 1.0
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(x.to(p.dtype), alpha=-group["lr"] * scale)


# ---------------------------------------------------------------- the log of a run
class Log:
    """A recorder, or none; keeps the gradients of each step too where a run is measured."""

    def __init__(self, folder, model, optimizer, context, mode, precision):
        self.model, self.rich, self.gradients = model, mode == "rich", []
        self.recorder = None
        if folder is not None:
            self.recorder = wb.Recorder(folder, model, optimizer, context=context, gradients="full" if self.rich else "norms")

    def note(self, loss=None, counts=None, metrics=None, tokens=None):
        if self.recorder is not None and self.rich:
            self.recorder.note(loss, counts=counts, metrics=metrics, tokens=tokens)
        elif self.recorder is not None and loss is not None:
            self.recorder.note(loss)

    def keep(self):
        """Before clipping: the gradients of this step, for measurements alone."""
        if self.recorder is None:
            self.gradients.append({n: p.grad.detach().clone() for n, p in self.model.named_parameters() if p.grad is not None})

    def done(self):
        if self.recorder is not None:
            self.recorder.close()
        return self.gradients, {n: p.detach().clone() for n, p in self.model.named_parameters()}


def compute(precision, weights=False):
    """Autocast where bf16 is autocast."""
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16" and not weights)
