"""Training for some steps, and the named tensors that must be bitwise equal in two layouts."""

from __future__ import annotations

import warnings

import torch

from tests.parity.cases import Meshes, as_batch
from workbench.policy.model import Policy, load_policy
from workbench.rollouts.batch import RolloutBatch
from workbench.sharding.gradients import full_weights
from workbench.sharding.mesh import Mesh, make_mesh
from workbench.specs.run import RunSpec
from workbench.train import step as flow
from workbench.train.exact import reproducible_mode
from workbench.train.optimizer import build_optimizer
from workbench.train.trace import certify, fingerprint_gradients


def train(
    settings: dict, documents: list[dict], mesh: Mesh | None = None, dealt: list[list[int]] | None = None
) -> dict:
    """All that a run of `settings` finds, step by step, as tensors by name; whole, on every rank."""
    spec = RunSpec.model_validate(settings)
    layout, batch = spec.layout, as_batch(documents)
    mesh = mesh or make_mesh(dp=layout.dp, cp=layout.cp, tp=layout.tp)
    policy = load_policy(
        spec.model.source,
        mesh=mesh,
        precision=spec.precision,
        tied=spec.model.tied,
        seed=spec.model.seed,
        temperature=spec.policy.temperature or 1.0,
        shard_parameters=layout.shard_parameters,
        reshard_after_forward=layout.reshard_after_forward,
        unit_layers=layout.unit_layers,
        checkpointing=layout.checkpointing,
    )
    with reproducible_mode(policy, spec):
        return _steps(policy, spec, batch, mesh, dealt)


def _steps(policy: Policy, spec: RunSpec, batch: RolloutBatch, mesh: Mesh, dealt: list[list[int]] | None) -> dict:
    loss, optimizer, actual = flow.build_loss(spec.loss), build_optimizer(policy, spec), {}
    for number in range(spec.steps):
        rows, totals = flow.prepare_rows(batch, spec, mesh, dealt)
        result = flow.run_step(
            policy,
            loss,
            rows,
            totals,
            num_source=batch.num_tokens,
            keep_gradients=True,
            level=spec.record.metrics,
            loss_spec=spec.loss,
        )
        marks = fingerprint_gradients(policy)
        norm = flow.clip_gradients(policy, result.norms, spec.optimizer.max_grad_norm)
        optimizer.step()
        certificate = bytearray.fromhex(certify(policy, result, marks).hash)
        output = (
            {"certificate": torch.frombuffer(certificate, dtype=torch.uint8)}
            | {
                name: torch.tensor(value, dtype=torch.float64)
                for name, value in (result.metrics | result.range | {"norm": norm}).items()
            }
            | {f"loss/{name}": torch.tensor(float(value), dtype=torch.float64) for name, value in result.loss.items()}
            | {f"norm/{name}": torch.tensor(value, dtype=torch.float64) for name, value in result.norms.items()}
            | {f"token/{name}": value for name, value in result.tokens.items()}
            | {f"gradient/{name}": value for name, value in result.gradients.items()}
            | {
                f"weight/{name}": value.clone()
                for name, value in full_weights(policy.model, policy.shards, mesh).items()
            }
        )
        actual |= {f"{number}/{name}": value.detach().cpu() for name, value in output.items()}
    return actual


def train_all(cases: list[tuple[dict, list[dict]]]) -> list[dict]:
    """Run several trainings in one set of processes; FSDP2's warnings are expected."""
    meshes = Meshes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return [train(settings, documents, meshes.of(settings)) for settings, documents in cases]


def differing(found: dict, expected: dict) -> list[str]:
    """Return the names with different bits, NaN and the sign of a zero included."""
    assert found.keys() == expected.keys()
    return [name for name, value in expected.items() if not same_bits(found[name], value)]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two tensors are bitwise equal."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(words), b.contiguous().view(words))
