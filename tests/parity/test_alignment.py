"""An aligned external trainer: its gradients are those of the oracle on a stock model.

The trainer has a device mesh of its own, rows under (a stand-in for) torch's context parallelism, and an engine: a
plain sum over ranks, DDP or FSDP2 as they come, which average. Four gloo ranks, dp x cp = 2 x 2; masks differ by rank,
and in one case a single rank has all that counts.
"""

from __future__ import annotations

import random

import pytest
import torch

from tests.helpers.bars import assert_float64_parity
from tests.helpers.pretended_ring import RING
from tests.helpers.ranks import run_ranks
from tests.oracles import step as paper
from workbench.parallel_loss.adjoints import local_to_global
from workbench.parallel_loss.align import align_loss
from workbench.policy.attention import with_torch_attention
from workbench.policy.decoder import tiny_qwen3
from workbench.policy.precision import lift_to_float64
from workbench.sharding.collectives import sum_identity, sum_sum
from workbench.specs.losses import LossSpec

T, LENGTHS = 128, (128, 33, 66, 3, 1, 90)
DP, CP = 2, 2
ENGINES = {"plain sum": "sum", "DDP": "mean", "FSDP2": "mean"}

GRPO = {"surrogate": {"clip_low": 0.2, "clip_high": 0.28}, "kl": {"coefficient": 0.07}}
LOSSES = {
    "grpo by token": LossSpec(name="grpo", denominator="token", **GRPO),
    "grpo by document": LossSpec(name="grpo", denominator="document", **GRPO),
    "gspo": LossSpec(name="gspo", surrogate={"clip_low": 0.05, "clip_high": 0.08}, denominator="document"),
}


def documents_of(case):
    """One row each: full, partly trained, one with nothing trained, one of a single token."""
    rng = random.Random(7)
    documents = []
    for number, length in enumerate(LENGTHS):
        mask = [int(t > 0 and (t * (number + 3)) % 7 > 2) for t in range(length)]
        if number == 3 or (case == "one busy rank" and number):
            mask = [0] * length
        if case == "one busy rank" and number == 0:
            mask = [int(0 < t < 12) for t in range(length)]  # the first chunk of the first row
        around = [[-rng.uniform(2.7, 3.2) for _ in range(length)] for _ in range(2)]
        documents.append(
            {
                "tokens": [rng.randrange(19) for _ in range(length)],
                "loss_mask": mask,
                "advantages": [(-1) ** number * rng.uniform(0.2, 2.0)] * length,
                "old_logprobs": around[0],
                "ref_logprobs": around[1],
            }
        )
    return documents


def as_rows(documents):
    """[B, T] tensors, padded at the end with values that must not matter."""

    def rows(name, fill, dtype):
        return torch.tensor([d[name] + [fill] * (T - len(d["tokens"])) for d in documents], dtype=dtype)

    return {
        "tokens": rows("tokens", 5, torch.long),
        "mask": rows("loss_mask", 0, torch.bool),
        "old_logprobs": rows("old_logprobs", float("nan"), torch.float64),
        "ref_logprobs": rows("ref_logprobs", float("nan"), torch.float64),
        "advantages": rows("advantages", float("nan"), torch.float64),
    }


def train_once(mesh, engine, spec, documents, micro_batches):
    """A rank of the trainer: loss and whole gradients."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    model = with_torch_attention(lift_to_float64(tiny_qwen3(19, seed=3)))
    names = [name for name, _ in model.named_parameters()]
    wrapped = DistributedDataParallel(model) if engine == "DDP" else model
    if engine == "FSDP2":
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh._flatten())
        fully_shard(model, mesh=mesh._flatten())
    align = align_loss(mesh, engine=ENGINES[engine])
    local = documents[mesh["dp"].get_local_rank() * 3 :][:3]
    cuts = [local] if micro_batches == 1 else [local[:2], local[2:]]
    batches = [as_rows(cut) for cut in cuts]
    counts = align.row_counts([batch["mask"] for batch in batches])
    loss = 0.0
    for batch in batches:
        with align.torch_context_parallel(**batch, ring=RING) as rows:
            part = rows.policy_loss(spec, logits=wrapped(**rows.model_inputs).logits, counts=counts)
            part.backward()
        loss += float(part.detach())
    gradients = [parameter.grad for parameter in model.parameters()]
    if engine == "plain sum":
        for gradient in gradients:
            dist.all_reduce(gradient)
    if engine == "FSDP2":
        gradients = [gradient.full_tensor() for gradient in gradients]
    return loss, dict(zip(names, (gradient.clone() for gradient in gradients), strict=True))


def train(cases):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (DP, CP), mesh_dim_names=("dp", "cp"))
    return [train_once(mesh, *case) for case in cases]


PAIRS = {"all-reduce backward": sum_sum, "identity backward": sum_identity}


def gradient_of_pairs():
    """Return d/dw of (sum over ranks of w x)^2 by the completing collective, and by engine; x of one rank is 0."""
    import torch.distributed as dist

    align = align_loss(cp=dist.group.WORLD, engine="sum")
    completions = PAIRS | {
        engine: lambda partial, axis, engine=engine: local_to_global(
            partial, (axis,), align_loss(cp=axis, engine=engine).factor
        )
        for engine in ("sum", "mean")
    }
    results = {}
    for name, complete in completions.items():
        weight = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        complete(weight * align.cp.rank, align.cp).square().backward()
        dist.all_reduce(weight.grad)
        results |= {(name, "sum"): float(weight.grad), (name, "mean"): float(weight.grad) / align.cp.size}
    return results


def test_an_adjoint_belongs_to_an_engine(tmp_path):
    """An adjoint and an engine that do not belong together are off by the number of ranks; ours are not."""
    ranks, truth = 4, 2 * 0.7 * 6**2
    expected = {
        ("all-reduce backward", "sum"): ranks,
        ("all-reduce backward", "mean"): 1,
        ("identity backward", "sum"): 1,
        ("identity backward", "mean"): 1 / ranks,
        ("sum", "sum"): 1,
        ("mean", "mean"): 1,
        ("sum", "mean"): 1 / ranks,
        ("mean", "sum"): ranks,
    }
    for result in run_ranks(gradient_of_pairs, ranks, tmp_path):
        assert {pair: gradient / truth for pair, gradient in result.items()} == pytest.approx(expected, rel=1e-14)


def truth(name, documents):
    model = paper.exact(tiny_qwen3(19, seed=3))
    if name != "gspo":
        settings = {"clip_low": 0.2, "clip_high": 0.28, "kl_coefficient": 0.07}
        return paper.grpo_step(model, documents, **settings, denominator=LOSSES[name].denominator)[:2]
    lengths = [sum(document["loss_mask"]) for document in documents]
    trained = sum(length > 0 for length in lengths)
    return paper.policy_step(
        model,
        documents,
        paper.document_logprobs(model, documents),
        paper.gspo(0.05, 0.08),
        weight=lambda number: 1 / (trained * max(lengths[number], 1)),
    )


def test_a_trainer_that_is_aligned_has_the_papers_gradients(tmp_path):
    """Each engine with each loss once or twice; micro-batches and the busy rank on all engines."""
    combinations = [
        ("plain sum", "grpo by token", "all", 1),
        ("DDP", "grpo by token", "all", 2),
        ("FSDP2", "grpo by token", "all", 2),
        ("plain sum", "gspo", "all", 2),
        ("DDP", "gspo", "all", 1),
        ("FSDP2", "grpo by document", "all", 1),
        ("plain sum", "grpo by document", "one busy rank", 2),
        ("DDP", "grpo by token", "one busy rank", 1),
        ("FSDP2", "gspo", "one busy rank", 1),
    ]
    documents = {case: documents_of(case) for case in ("all", "one busy rank")}
    truths = {key: truth(key[0], documents[key[1]]) for key in {(name, case) for _, name, case, _ in combinations}}
    assert max(float(g.norm()) for g in truths["gspo", "all"][1].values()) > 1e-2
    answers = run_ranks(
        train,
        DP * CP,
        tmp_path,
        [(engine, LOSSES[name], documents[case], cut) for engine, name, case, cut in combinations],
    )
    for number, (engine, name, case, cut) in enumerate(combinations):
        expected_loss, expected = truths[name, case]
        for rank, result in enumerate(answers):
            context = f"{engine}, {name}, {case}, {cut} micro-batches, rank {rank}"
            loss, gradients = result[number]
            assert loss == pytest.approx(expected_loss, rel=1e-12, abs=1e-13), context
            assert_float64_parity(gradients, expected, context=context)
