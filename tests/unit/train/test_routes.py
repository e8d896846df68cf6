import dataclasses

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.mixtures import save_tiny_glm4_moe
from tests.helpers.online_runs import done
from workbench.errors import RecordError, ShapeError, SpecError
from workbench.policy.model import load_policy
from workbench.records.directory import RunDirectory
from workbench.rollouts.batch import Extension, RolloutBatch
from workbench.rollouts.files import load
from workbench.sharding.mesh import single_process_mesh
from workbench.specs.run import RunSpec
from workbench.train import step as flow
from workbench.train.checkpoint import OPTIMIZER, load_checkpoint
from workbench.train.optimizer import build_optimizer
from workbench.train.routes import ROUTES, check_routes, checksum
from workbench.train.worker import run_here

LENGTHS = (4, 3, 1)


def batch_of(routes=None, **changes):
    documents = [
        {
            "tokens": list(range(1, length + 1)),
            "loss_mask": [0] + [1] * (length - 1),
            "advantages": 0.5 - number,
            "old_logprobs": [0.0] + [-1.0] * (length - 1),
            "ref_logprobs": [0.0] + [-1.5] * (length - 1),
        }
        for number, length in enumerate(LENGTHS)
    ]
    batch = RolloutBatch.from_documents(documents)
    if routes is None:
        return batch
    settings = {"level": "token", "unit": "expert", "meaning": "Its experts.", "at": "input"} | changes
    return dataclasses.replace(batch, extensions={ROUTES: Extension(routes, **settings)})


def routes(**places):
    """[8, 2, 2] routes, in which some places are changed."""
    values = torch.tensor([[0, 1], [3, 2]]).repeat(8, 1, 1)
    for name, value in places.items():
        values[tuple(int(digit) for digit in name[1:])] = value
    return values


SPEC = {"model": {"source": "tiny-qwen3-moe"}, "routing": {"replay": "recorded"}}


def step_with(batch, **settings):
    spec = RunSpec.model_validate(SPEC | settings)
    mesh = single_process_mesh()
    policy = load_policy(spec.model.source, mesh=mesh, routing=spec.routing.on)
    rows, totals = flow.prepare_rows(batch, spec, mesh)
    return flow.run_step(
        policy, flow.build_loss(spec.loss), rows, totals, num_source=batch.num_tokens, routing=spec.routing
    )


def test_whole_routes_and_those_without_last_tokens_are_accepted():
    for values, tokens in ((routes(), 8), (routes(_3=-1, _6=-1, _7=-1), 5)):
        spec = RunSpec.model_validate(SPEC)
        check_routes(batch_of(values))
        _, totals = flow.prepare_rows(batch_of(values), spec, single_process_mesh())
        assert totals.routing == {"tokens": tokens, "largest_expert": 3, "mixtures": 2, "chosen": 2}


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (routes(_3=-1, _1=-1), "1 tokens without a route in some mixture, the first at 1, in document 0"),
        (routes(_31=-1), "the first at 3"),  # the last token of its document, in one of two mixtures
        (routes(_310=-1), "the first at 3"),
        (routes(_500=1), r"experts \[\[1, 1\], \[3, 2\]\] of token 5"),
        (routes(_500=-2), r"experts \[\[-2, 1\], \[3, 2\]\] of token 5"),
        (routes().flatten(1), r"torch.int64 \[8, 4\]"),
        (routes().int(), "torch.int32"),
    ],
)
def test_partial_and_damaged_routes_are_refused(values, found):
    with pytest.raises(ShapeError, match=found):
        check_routes(batch_of(values))


def test_missing_and_misaligned_routes_are_refused():
    with pytest.raises(SpecError, match="a batch without the extension routes"):
        step_with(batch_of())
    with pytest.raises(ShapeError, match=r"shape \(7, 2, 2\), not \[8\]"):
        batch_of(routes()[:-1])
    with pytest.raises(ShapeError, match="token values at the target"):
        step_with(batch_of(routes(), at="target"))
    with pytest.raises(ShapeError, match="3 mixtures, 2 experts of a token, the largest 3"):
        step_with(batch_of(torch.cat([routes(), routes()[:, :1]], dim=1)))
    with pytest.raises(ShapeError, match="2 mixtures, 1 experts of a token"):
        step_with(batch_of(routes()[..., :1]))
    with pytest.raises(ShapeError, match="the largest 4"):
        step_with(batch_of(routes(_500=4)))


def test_settings_that_a_policy_cannot_follow_are_refused():
    with pytest.raises(SpecError, match="routers without a bias of the choice"):
        step_with(batch_of(), routing={"bias_step": 0.1})
    spec = RunSpec.model_validate(SPEC | {"routing": {"z": 0.1}})
    policy = load_policy(spec.model.source)
    rows, totals = flow.prepare_rows(batch_of(), spec, policy.mesh)
    with pytest.raises(SpecError, match="a policy that was loaded without routers"):
        flow.run_step(policy, flow.build_loss(spec.loss), rows, totals, routing=spec.routing)


def test_a_router_that_notes_nothing_is_an_error():
    """As a replay that a router never received, after which training continues with its own routes."""
    spec = RunSpec.model_validate(SPEC)
    policy = load_policy(spec.model.source, routing=True)
    orphan = policy.routers.modules[1]
    orphan.forward = orphan.forward.forward
    rows, totals = flow.prepare_rows(batch_of(routes()), spec, policy.mesh)
    with pytest.raises(SpecError, match=r"model.layers.2.mlp.gate noted other routes than 16"):
        flow.run_step(policy, flow.build_loss(spec.loss), rows, totals, routing=spec.routing)


def test_recorded_routes_replay_to_the_same_bits(tmp_path):
    """A run that records, a dataset with its routes, a run in another layout that replays them."""
    batch_of().save(tmp_path / "rollouts")
    settings = {"model": {"source": "tiny-qwen3-moe"}, "data": {"path": str(tmp_path / "rollouts")}, "steps": 1}

    def run(name, **more):
        directory = RunDirectory.create(tmp_path / "runs", name, RunSpec.model_validate(settings | more))
        run_here(directory, tmp_path)
        return directory

    first = run("first", routing={"record": True})
    taken = first.read_tensors("step0000.routes")[ROUTES]
    assert taken.shape == (8, 2, 2)
    assert (taken >= 0).all()
    batch_of(taken).save(tmp_path / "with_routes")
    assert torch.equal(load(tmp_path / "with_routes").extensions[ROUTES].values, taken)
    settings["data"] = {"path": str(tmp_path / "with_routes")}
    second = run("second", routing={"replay": "recorded"}, layout={"dp": 2})
    one, two = first.steps()[0], second.steps()[0]
    assert two["router/disagreement/share"] == 0.0
    assert two["gradient/norm/global"] == pytest.approx(one["gradient/norm/global"], rel=1e-5)
    assert one["router/load/max"] == two["router/load/max"] >= 1


def test_online_runs_replay_the_routes_of_the_old_pass(tmp_path):
    """At the first update nothing has moved; at the second, routers would choose otherwise."""
    settings = {"steps": 2, "online": {"updates": 2}, "data": {"documents_per_step": 6}, "layout": {"cp": 2}}
    run = done(tmp_path, model={"source": "tiny-qwen3-moe"}, routing={"replay": "old", "record": True}, **settings)
    first, second = run.steps()
    assert first["router/disagreement/share"] == 0
    assert first["ratio/policy_old/std"] == 0
    assert second["router/disagreement/share"] > 0
    replayed = load(run.path / "rollouts" / "step0000").extensions[ROUTES].values
    for step in (0, 1):
        taken = run.read_tensors(f"step000{step}.routes")[ROUTES]
        of_step = (taken >= 0).flatten(1).all(dim=1)
        assert of_step.any()
        assert torch.equal(taken[of_step], replayed[of_step])


@pytest.mark.parametrize("layout", [{}, {"dp": 2, "ep": 2}], ids=str)
@pytest.mark.parametrize("sampler", ["float64", "bfloat16"])
def test_online_runs_replay_the_routes_of_their_sampler(tmp_path, sampler, layout):
    """In the old pass and in training: those of the trainer's own choice in float64, where no choice is near a tie."""
    settings = {"steps": 1, "online": {"sampler_precision": sampler}, "layout": layout, "precision": "float64"}
    run = done(tmp_path, model={"source": "tiny-qwen3-moe"}, routing={"replay": "recorded", "record": True}, **settings)
    [step] = run.steps()
    assert step["ratio/policy_old/std"] == 0
    batch = load(run.path / "rollouts" / "step0000")
    routes = batch.extensions[ROUTES].values
    last = torch.cat([batch.document_ids_T[1:] != batch.document_ids_T[:-1], torch.tensor([True])])
    assert torch.equal((routes < 0).flatten(1).all(dim=1), last), "what is not fed back has no route"
    taken = run.read_tensors("step0000.routes")[ROUTES]
    assert torch.equal(taken[~last], routes[~last])
    assert sampler == "bfloat16" or step["router/disagreement/share"] == 0


def test_biases_of_routers_move_after_a_step_and_are_in_checkpoints(tmp_path):
    folder = save_tiny_glm4_moe(tmp_path / "glm")
    batch_of().save(tmp_path / "rollouts")
    spec = RunSpec.model_validate(
        {
            "model": {"source": folder},
            "data": {"path": str(tmp_path / "rollouts")},
            "routing": {"bias_step": 0.125},
            "layout": {"pp": 2},
            "record": {"checkpoint_every": 1},
        }
    )
    run = RunDirectory.create(tmp_path / "runs", "one", spec)
    run_here(run, tmp_path)
    policy = load_policy(folder, routing=True)
    biases = policy.routers.biases(policy.model)
    before = {number: bias.clone() for number, bias in biases.items()}
    [checkpoint] = run.checkpoints().values()
    load_checkpoint(checkpoint, policy, build_optimizer(policy, spec))
    for number, bias in biases.items():
        moved = (bias - before[number]).tolist()
        assert set(np.round(moved, 6)) <= {-0.125, 0.0, 0.125}
        assert any(moved), number
    state = load_file(checkpoint / OPTIMIZER)
    save_file({name: value for name, value in state.items() if "bias" not in name}, checkpoint / OPTIMIZER)
    with pytest.raises(RecordError, match=r"no model\.layers\.1\.mlp\.gate\.e_score"):
        load_checkpoint(checkpoint, policy, build_optimizer(policy, spec))


def test_a_checksum_is_of_every_tokens_experts_and_adds_up_over_parts():
    experts_tk, source_t = torch.tensor([[0, 1], [2, 3], [1, 3]]), torch.tensor([4, 7, 0])
    whole = checksum(experts_tk, source_t, 1)
    parts = checksum(experts_tk[:1], source_t[:1], 1) + checksum(experts_tk[1:], source_t[1:], 1)
    assert float(parts) % 2.0**40 == float(whole)
    assert checksum(experts_tk.flip(0).flip(1), source_t.flip(0), 1) == whole, "in any order"
    others = [
        checksum(torch.tensor([[0, 1], [2, 1], [1, 3]]), source_t, 1),
        checksum(experts_tk.roll(1, 0), source_t, 1),
        checksum(experts_tk, source_t, 0),
    ]
    assert all(float(other) != float(whole) for other in others)
