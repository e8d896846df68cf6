"""Steps of an encoder and a policy on one set of ranks, and the same steps on none."""

from __future__ import annotations

import copy
import functools
import random
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.helpers.batches import nasty_documents, near_policy
from tests.oracles import encoder as images_oracle
from tests.oracles import step as step_oracle
from workbench.policy.decoder import TINY_VISION, tiny_qwen3
from workbench.policy.encoder import make_encoder
from workbench.policy.model import Policy, load_policy
from workbench.rollouts.batch import RolloutBatch
from workbench.sharding.bridge import Grid, GridGroups, connect
from workbench.sharding.simulated import simulate
from workbench.specs.run import RunSpec
from workbench.train import encoder_step, step

LOSS = {
    "name": "grpo",
    "surrogate": {"clip_low": 0.2, "clip_high": 0.3},
    "kl": {"coefficient": 0.05},
    "denominator": "token",
}
LEARNING_RATE = 0.05


@dataclass(frozen=True)
class Case:
    """Two layouts, (tp, cp, dp) each, and the delivery between them."""

    source: tuple[int, int, int]
    destination: tuple[int, int, int]
    images: int = 8
    delivery: str = "sharded"
    micro_batches: int = 1
    steps: int = 1
    vision: str = "tiny-siglip"
    source_order: str = "contiguous"
    bridge_order: str | None = None
    layout: tuple[tuple[str, Any], ...] = ()
    shared: bool = False

    @property
    def ranks(self):
        tp, cp, dp = self.source
        return tp * cp * dp

    @property
    def spec(self):
        tp, cp, dp = self.destination
        order = "zigzag" if cp > 1 else "contiguous"
        return RunSpec.model_validate(
            {
                "model": {"source": "tiny-qwen3", "seed": 3},
                "precision": "float64",
                "loss": LOSS,
                "layout": {"tp": tp, "cp": cp, "dp": dp, "order": order, **dict(self.layout)},
                "data": {"micro_batches": self.micro_batches},
                "policy": {"temperature": 1.0},
            }
        )


TOKENS = {"tiny-siglip": 4, "tiny-clip": 5}


def problem(case):
    """Documents, the features that their tokens read, and pixels; see `_problem`."""
    return _problem(case.images, case.vision, case.shared)


@functools.cache
def _problem(images, vision, shared):
    """Documents, features that their tokens read, and pixels. Masks are uneven; features begin anywhere in a document.

    Unless they are shared each document reads at most one image, and none is read twice; a document that trains
    nothing reads one too, so that its gradient is zero and must still come.
    """
    rng, size = random.Random(5), TOKENS[vision]
    documents = nasty_documents(7, count=max(images + 1, 9))
    reads = [[None] * len(document["tokens"]) for document in documents]
    for image in range(images):
        document = documents[image]
        prompt = rng.randint(0, 3)
        for name, filling in (("tokens", 0), ("loss_mask", 0), ("old_logprobs", 0.0), ("ref_logprobs", 0.0)):
            document[name] = document[name][:prompt] + [filling] * size + document[name][prompt:]
        document["loss_mask"][0] = 0
        document["advantages"] = [document["advantages"][0]] * len(document["tokens"])
        looked_at = image // 2 if shared else image
        reads[image] = [
            (looked_at, at - prompt) if prompt <= at < prompt + size else None for at in range(len(document["tokens"]))
        ]
    generator = torch.Generator().manual_seed(2)
    pixels = torch.randn(images, 3, 8, 8, generator=generator)
    reader = oracle_reader(vision, pixels, documents, reads)
    output = step_oracle.document_logprobs(reader, documents)
    documents = near_policy(
        documents, [[float("nan") if v is None else v.item() for v in row] for row in output], 3, spread=0.2
    )
    return documents, reads, pixels


def oracle_reader(vision, pixels, documents, reads):
    """The oracle's model on the weights that `modules` has."""
    kept = dict(_whole_encoder(vision).model.projector.named_parameters())
    decoder = step_oracle.exact(tiny_qwen3(19, seed=3))
    return images_oracle.Reader(TINY_VISION[vision](seed=4), kept, decoder, pixels, documents, reads)


@functools.cache
def _whole_encoder(vision):
    return make_encoder(TINY_VISION[vision](seed=4), 64, seed=6)


def truth(case):
    """Loss and gradients of each step on one process, a document at a time, with plain gradient descent in between."""
    return _truth(case.images, case.vision, case.shared, 2)[: case.steps]


@functools.cache
def _truth(images, vision, shared, steps):
    documents, reads, pixels = _problem(images, vision, shared)
    reader = oracle_reader(vision, pixels, documents, reads)
    results = []
    for _ in range(steps):
        loss, gradients, _ = step_oracle.grpo_step(
            reader, documents, clip_low=0.2, clip_high=0.3, kl_coefficient=0.05, denominator="token"
        )
        results.append((loss, images_oracle.named_as_ours(gradients)))
        with torch.no_grad():
            for name, parameter in reader.named_parameters():
                parameter -= LEARNING_RATE * gradients[name]
    return results


def batch_of(case, documents, reads):
    """The documents as a batch."""
    size = TOKENS[case.vision]
    numbers = [-1 if read is None else read[0] * size + read[1] for row in reads for read in row]
    batch = RolloutBatch.from_documents(
        [
            {
                name: torch.tensor(values, dtype=torch.float64) if name.endswith(("logprobs", "advantages")) else values
                for name, values in document.items()
            }
            for document in documents
        ]
    )
    return replace(batch, extensions={encoder_step.IMAGE_FEATURES: encoder_step.image_features(torch.tensor(numbers))})


def dealt_for(case, documents):
    """Return rows whose images are those that a bridge of whole sequences deals to each dp rank."""
    if case.delivery == "sharded":
        return None
    dp, each = case.destination[2], case.micro_batches
    rows = [[] for _ in range(dp * each)]
    per_batch = [case.images // each + (number < case.images % each) for number in range(each)]
    image = 0
    for number, count in enumerate(per_batch):
        for rank in range(dp):
            for _ in range(count // dp + (rank < count % dp)):
                rows[rank * each + number].append(image)
                image += 1
    rows[-1] += range(case.images, len(documents))
    return rows


def modules(case, source_mesh, destination_mesh):
    """Encoder and policy of a rank."""
    encoder = make_encoder(
        TINY_VISION[case.vision](seed=4), 64, mesh=source_mesh, precision="float64", seed=6, order=case.source_order
    )
    spec = case.spec
    if destination_mesh["tp"].size > 1:
        policy = load_policy(
            "tiny-qwen3",
            mesh=destination_mesh,
            precision="float64",
            seed=3,
            sequence_parallel=spec.layout.sequence_parallel,
        )
    else:
        policy = replace(_whole_policy(), model=copy.deepcopy(_whole_policy().model), mesh=destination_mesh)
    return encoder, policy


@functools.cache
def _whole_policy() -> Policy:
    return load_policy("tiny-qwen3", precision="float64", seed=3)


def steps_of(case, world, given):
    """On a rank: the result of each step, and the text of the bridge; ``given``: from `problem`."""
    documents, reads, pixels = given
    batch = batch_of(case, documents, reads)
    groups = GridGroups(world)
    tp, cp, dp = case.source
    source = Grid.of(tp=tp, cp=cp, dp=dp)
    tp, cp, dp = case.destination
    destination = Grid.of(tp=tp, cp=cp, dp=dp)
    meshes = groups.mesh(source), groups.mesh(destination)
    sequence_parallel = case.spec.layout.sequence_parallel and tp > 1
    bridge = connect(
        source,
        destination,
        groups,
        delivery=case.delivery,
        order=case.spec.layout.order if case.delivery == "sharded" else case.bridge_order,
        source_order=case.source_order,
        sequence_parallel=sequence_parallel and case.delivery == "sharded",
    )
    encoder, policy = modules(case, *meshes)
    loss = step.build_loss(case.spec.loss)
    parameters = [*encoder.model.parameters(), *policy.model.parameters()]
    results = []
    for _ in range(case.steps):
        rows, totals = encoder_step.prepare_image_rows(
            batch, pixels, case.spec, policy.mesh, encoder, bridge, dealt_for(case, documents)
        )
        results.append(
            encoder_step.run_image_step(
                encoder,
                policy,
                loss,
                rows,
                totals,
                num_source=batch.num_tokens,
                keep_gradients=True,
                level="full",
                loss_spec=case.spec.loss,
            )
        )
        with torch.no_grad():
            for parameter in parameters:
                parameter -= LEARNING_RATE * parameter.grad
    path = str(bridge)
    groups.destroy()
    return results, path


def simulated(case):
    """Rank 0's steps on simulated ranks, and the path."""
    return simulate(lambda mesh: steps_of(case, mesh["dp"], problem(case)), dp=case.ranks)[0]
