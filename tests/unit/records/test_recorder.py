"""Recording an external trainer: the record matches the model, on one rank, under DDP and under FSDP2."""

import math
import subprocess
import sys

import pytest
import torch
from torch import nn

from tests.helpers.ranks import run_ranks
from workbench.errors import RecordError, ShapeError, SpecError
from workbench.records import trainer_files as files
from workbench.records.recorder import Recorder
from workbench.sharding.given_parameters import TensorShards
from workbench.sharding.tensor_parallel import ParameterShard

DATA = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
"""Six samples, dealt over ranks and micro-batches."""


def model_of(seed=1):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def loss_of(model, samples, total=6):
    """The share of these samples in the mean over all."""
    return model(samples).square().sum() / total


def trained():
    """A model that holds gradients."""
    model = model_of()
    loss_of(model, DATA).backward()
    return model


def with_buffers(model):
    """As Megatron's DDP has it: every gradient is added to a buffer in float32, and ``grad`` is None again."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
            parameter.register_post_accumulate_grad_hook(_into_buffer)
    return model


def _into_buffer(parameter):
    """A hook without a reference to its parameter: torch's garbage collection does not see those of such hooks, and the
    parameter, its model and what records it would live until the process ends."""
    parameter.main_grad.add_(parameter.grad)
    parameter.grad = None


def steps_of(folder):
    return files.read_steps(folder)


def norms_of(model):
    return {name: float(parameter.grad.norm()) for name, parameter in model.named_parameters()}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "records" / "mine"


class TestAlone:
    def test_micro_batches_make_one_step(self, folder):
        model, expected = model_of(), model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recorder = Recorder(folder, model, optimizer, context={"dp": 1, "trainer": "mine"}, gradients="full")
        for samples in DATA.split(2):
            loss = loss_of(model, samples)
            loss.backward()
            recorder.note(loss, counts={"documents": len(samples)}, metrics={"lr": 0.5 * len(samples)})
        optimizer.step()
        whole = loss_of(expected, DATA)
        whole.backward()
        [step] = steps_of(folder)
        assert step["loss"] == pytest.approx(whole.item(), rel=1e-14)
        assert step["counts"] == {"documents": 6.0}
        assert step["metrics"] == {"lr": 1.0}
        assert step["gradient_norms"] == pytest.approx(norms_of(expected), rel=1e-14)
        gradients = files.read_tensors(folder, 0, "gradients")
        assert set(gradients) == {"0.weight", "0.bias", "2.weight", "2.bias"}
        for name, parameter in expected.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-13, atol=1e-16)
        context = files.read_context(folder)
        assert context.pop("observed")["optimizers"] == ["SGD"]
        assert context == {
            "precision": "float64",
            "optimizer": "sgd",
            "learning_rate": 0.1,
            "dp": 1,
            "trainer": "mine",
        }

    def test_a_manual_step_needs_no_optimizer_and_may_be_empty(self, folder):
        model = model_of()
        recorder = Recorder(folder, model)
        loss = loss_of(model, DATA)
        loss.backward()
        recorder.step(loss, counts={"documents": 6})
        model.zero_grad(set_to_none=False)
        recorder.step()
        first, second = steps_of(folder)
        assert first["loss"] == loss.item()
        assert (second["step"], second["loss"], second["counts"]) == (1, None, {})
        assert set(second["gradient_norms"].values()) == {0.0}
        assert files.read_tensors(folder, 0, "gradients") is None
        assert repr(recorder) == "Recorder(mine: 2 steps)"

    def test_gradients_taken_before_clipping_are_those_of_the_loss(self, folder):
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recorder = Recorder(folder, model, optimizer, gradients="full")
        for taken in (True, False):
            optimizer.zero_grad()
            loss_of(model, DATA, total=0.01).backward()
            before = norms_of(model)
            if taken:
                recorder.take_gradients()
            for parameter in model.parameters():  # by hand: torch's own function is seen
                parameter.grad.mul_(0.01)
            clipped = norms_of(model)
            optimizer.step()
            norms = steps_of(folder)[-1]["gradient_norms"]
            assert norms == pytest.approx(before if taken else clipped, rel=1e-14)
            assert norms != pytest.approx(clipped if taken else before, rel=0.5)
            whole = files.read_tensors(folder, 0 if taken else 1, "gradients")
            assert float(whole["0.weight"].norm()) == pytest.approx(norms["0.weight"], rel=1e-14)

    def test_losses_are_divided_as_an_engine_divides_gradients_after_backward(self, folder):
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recorder = Recorder(folder, model, optimizer)
        for each in DATA.split(2):
            loss_of(model, each, total=1).backward()
        for parameter in model.parameters():
            parameter.grad.div_(len(DATA))
        recorder.multiply_losses(1 / len(DATA))
        expected = loss_of(model, DATA).item()
        optimizer.step()
        assert steps_of(folder)[0]["loss"] == pytest.approx(expected, rel=1e-14)
        last = loss_of(model, DATA)
        last.backward()
        optimizer.step()
        recorder.close()
        assert steps_of(folder)[1]["loss"] == last.item()

    def test_nothing_changes_for_the_trainer(self, folder):
        def train(recorded):
            torch.manual_seed(3)
            model = model_of()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            recorder = Recorder(folder, model, optimizer, gradients="full") if recorded else None
            for _ in range(3):
                optimizer.zero_grad()
                loss = loss_of(model, DATA + torch.randn_like(DATA))
                loss.backward()
                if recorder:
                    recorder.note(loss, tokens={"policy_logprobs": torch.rand(2, generator=torch.Generator())})
                optimizer.step()
            return [parameter.detach().clone() for parameter in model.parameters()] + [torch.rand(2)]

        for with_it, without in zip(train(True), train(False), strict=True):
            assert torch.equal(with_it, without)
        assert len(steps_of(folder)) == 3

    def test_an_optimizer_of_an_engine_is_only_read(self, folder):
        model = trained()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recorder = Recorder(folder, model, optimizer, manual=True)
        recorder.take_gradients(max_norm=2)
        recorder.step(1.0)
        optimizer.step()
        [step] = steps_of(folder)
        assert step["observed"]["clip"] == {"max_norm": 2.0}
        assert step["observed"]["optimizers"][0][0]["lr"] == 0.1

    @pytest.mark.parametrize("cleared", [True, False])
    def test_buffers_of_megatron_that_were_not_cleared_are_seen(self, cleared, folder):
        model = with_buffers(model_of())
        recorder = Recorder(folder, model)
        for _ in range(2):
            loss_of(model, DATA).backward()
            recorder.step(1.0)
            if cleared:
                for parameter in model.parameters():
                    parameter.main_grad.zero_()
        assert [step["observed"]["cleared"] for step in steps_of(folder)] == [True, cleared]

    def test_tokens_are_put_in_source_order(self, folder):
        recorder = Recorder(folder, trained())
        recorder.note(tokens={"policy_logprobs": torch.tensor([[-0.4, -0.9]]), "source": torch.tensor([[4, -1]])})
        recorder.note(tokens={"policy_logprobs": torch.tensor([[-0.0], [-0.2]]), "source": torch.tensor([[0], [2]])})
        recorder.step()
        recorder.step(tokens={"policy_logprobs": torch.tensor([-3.0, -1.0]), "trained": torch.tensor([True, False])})
        read = files.read_tensors(folder, 0, "tokens")
        assert sorted(read) == ["policy_logprobs", "rows"]
        assert read["rows"].tolist() == [1, -1, 1, -1, 0], "-1: no token has this place"
        assert read["policy_logprobs"].tolist() == pytest.approx([0.0, 0.0, -0.2, 0.0, -0.4])
        read = files.read_tensors(folder, 1, "tokens")
        assert read["policy_logprobs"].tolist() == [-3.0, -1.0]
        assert read["trained"].tolist() == [True, False]

    def test_two_tokens_with_one_place_are_counted(self, folder):
        recorder = Recorder(folder, trained())
        recorder.note(tokens={"trained": torch.tensor([True, False]), "source": torch.tensor([3, 3])})
        recorder.step()
        [step] = files.read_steps(folder)
        assert step["observed"]["repeated"] == 1
        assert files.read_tensors(folder, 0, "tokens")["trained"].tolist() == [False, False, False, True]

    def test_names_that_diagnose_does_not_read_are_refused(self, folder):
        recorder = Recorder(folder, trained())
        with pytest.raises(ShapeError, match="rename it to 'advantages'"):
            recorder.note(tokens={"advantage": torch.ones(2)})
        with pytest.raises(RecordError, match="a metric is a number"):
            recorder.note(metrics={"stage": "warm"})

    def test_a_loss_that_is_no_number_is_recorded(self, folder):
        Recorder(folder, trained()).step(math.nan)
        assert math.isnan(steps_of(folder)[0]["loss"])

    def test_gradients_in_the_buffers_of_megatron_are_read(self, folder):
        model, expected = with_buffers(model_of()), trained()
        recorder = Recorder(folder, model, gradients="full")
        for samples in DATA.split(2):
            loss_of(model, samples).backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        recorder.step(1.0)
        [step] = steps_of(folder)
        assert step["gradient_norms"] == pytest.approx(norms_of(expected), rel=1e-6)
        assert min(step["gradient_norms"].values()) > 1e-3
        gradients = files.read_tensors(folder, 0, "gradients")
        for name, parameter in expected.named_parameters():
            torch.testing.assert_close(gradients[name].double(), parameter.grad, rtol=1e-5, atol=1e-7)
        assert "no_gradient" not in step

    def test_a_gradient_comes_before_the_buffer(self, folder):
        model = trained()
        for parameter in model.parameters():
            parameter.main_grad = torch.zeros_like(parameter)
        Recorder(folder, model).step(1.0)
        assert steps_of(folder)[0]["gradient_norms"] == pytest.approx(norms_of(model), rel=1e-14)

    @pytest.mark.parametrize(("losses", "refused"), [((0.5, -0.5), True), ((), True), ((0.0, 0.0), False)])
    def test_buffers_that_were_cleared_are_refused_unless_the_losses_are_zero(self, folder, losses, refused):
        model = with_buffers(model_of())
        loss_of(model, DATA).backward()
        for parameter in model.parameters():
            parameter.main_grad.zero_()
        recorder = Recorder(folder, model)
        for loss in losses:
            recorder.note(loss)
        if refused:
            with pytest.raises(RecordError, match="before zero_grad_buffer") as caught:
                recorder.step()
            assert "main_grad is 0 in every element of all 4 parameters" in caught.value.parts["found"]
            assert steps_of(folder) == []
        else:  # a step in which nothing trains
            recorder.step()
            assert set(steps_of(folder)[0]["gradient_norms"].values()) == {0.0}

    @pytest.mark.parametrize("how", ["never", "cleared", "hook", "take"])
    def test_without_any_gradient_nothing_is_recorded(self, folder, how):
        model = model_of() if how == "never" else trained()
        model.zero_grad()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recorder = Recorder(folder, model, optimizer if how == "hook" else None)
        does = {"hook": optimizer.step, "take": recorder.take_gradients}.get(how, lambda: recorder.step(1.0))
        with pytest.raises(RecordError) as caught:
            does()
        assert caught.value.parts["found"] == (
            "no gradient in any of 4 trained parameter(s): grad is None and there "
            "is no main_grad in 0.weight, 0.bias, 2.weight and 1 more"
        )
        assert "take_gradients() after backward and before zero_grad()" in caught.value.parts["fix"]
        assert steps_of(folder) == []

    def test_a_missing_gradient_is_zero_and_named_and_a_frozen_one_is_left_out(self, folder):
        model = model_of()
        model[0].bias.requires_grad_(False)
        loss_of(model, DATA).backward()
        model[2].weight.grad = None
        recorder = Recorder(folder, model)
        recorder.step(1.0)
        loss_of(model, DATA).backward()
        recorder.step(1.0)
        first, second = steps_of(folder)
        assert list(first["gradient_norms"]) == ["0.weight", "2.weight", "2.bias"]
        assert first["gradient_norms"]["2.weight"] == 0.0
        assert first["no_gradient"] == ["2.weight"]
        assert "no_gradient" not in second

    def test_it_ends_with_its_block(self, folder):
        model = trained()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Recorder(folder, model, optimizer):
            optimizer.step()
        optimizer.step()
        assert len(steps_of(folder)) == 1

    def test_invalid_records_are_refused(self, folder):
        class FullyShardedDataParallel(nn.Module):
            pass

        with pytest.raises(SpecError, match="use FSDP2"):
            Recorder(folder, nn.Sequential(FullyShardedDataParallel()))
        sharding = nn.Linear(1, 1)
        sharding.ddp_config = type("Config", (), {"use_distributed_optimizer": True})()
        with pytest.raises(SpecError, match="use_distributed_optimizer=False"):
            Recorder(folder, nn.Sequential(sharding))
        with pytest.raises(SpecError, match="pass the model that is trained"):
            Recorder(folder, model_of().requires_grad_(False))
        recorder = Recorder(folder, model_of())
        with pytest.raises(RecordError, match="never replaced"):
            Recorder(folder, model_of())
        with pytest.raises(ShapeError, match="all have one shape"):
            recorder.note(tokens={"trained": torch.ones(2), "ratios": torch.ones(3)})
        recorder.note(tokens={"ratios": torch.ones(3)})
        with pytest.raises(ShapeError, match="has the same: ratios"):
            recorder.note(tokens={"trained": torch.ones(3)})

    def test_it_needs_no_more_than_torch_and_safetensors(self):
        code = (
            "import sys, torch; before = set(sys.modules); import workbench.records.recorder;"
            "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}"
            " - set(sys.stdlib_module_names)))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert set(done.stdout.split()) <= {"workbench", "torch"}


def train_on_ranks(folder):
    """Under DDP and FSDP2, with a rank that has fewer entries than the other; and the norms each rank sees."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Partial
    from torch.nn.parallel import DistributedDataParallel

    rank = dist.get_rank()
    samples = [DATA[:4], DATA[4:]][rank]
    sharded = model_of()
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    summed = model_of()
    for layer in (summed[0], summed):
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
        layer.set_gradient_divide_factor(1.0)
        layer.set_force_sum_reduction_for_comms(True)
    cases = {"ddp": (DistributedDataParallel(model_of()), "mean"), "fsdp2": (sharded, "mean"), "sum": (summed, "sum")}
    for name, (model, engine) in cases.items():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        recorder = Recorder(folder / name, model, optimizer, gradients="full", engine=engine)
        for _ in range(2):
            optimizer.zero_grad()
            for micro_batch in samples.chunk(2):
                # An engine that averages needs each rank's share of the loss once for every rank.
                loss = loss_of(model, micro_batch) * (2 if engine == "mean" else 1)
                loss.backward()
                told = {"documents": len(micro_batch)} | ({"masked_documents": 0.5} if rank else {})
                recorder.note(loss, counts=told, metrics={"rank": rank})
            if name != "sum":  # in several precisions; and of "sum" from one rank only
                value, place = torch.tensor([-1.0, -2.0]) - rank, torch.tensor([1, 0]) + 2 * rank
                recorder.note(tokens={"policy_logprobs": value if rank else value.double(), "source": place})
            elif rank:
                recorder.note(tokens={"policy_logprobs": torch.tensor([-1.0, -2.0])})
            optimizer.step()
    neighbours = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    recorder = Recorder(folder / "tp", trained(), ranks=neighbours["dp"])
    partial = DTensor.from_local(torch.tensor(1.0 + rank), neighbours["tp"], [Partial()])
    recorder.step(partial, counts={"documents": 6}, tokens={"ratios": torch.ones(3)})
    with pytest.raises(RecordError, match="never replaced"):  # on every rank, without waiting
        Recorder(folder / "ddp", cases["ddp"][0])
    with pytest.raises(RecordError, match="no gradient in any of 4"):  # likewise
        Recorder(folder / "none", model_of()).step()
    halves = model_of()  # each rank has gradients of its own layer alone
    loss_of(halves[2 * rank], torch.ones(1, 3 if rank else 4).double()).backward()
    Recorder(folder / "halves", halves).step()
    return sorted(path.name for path in (folder / "ddp").iterdir())


def train_on_tp(folder):
    """Columns of one weight are sharded over two ranks, and the last layer has partial sums of its gradients."""
    import torch.distributed as dist

    rank, gradient, model = dist.get_rank(), trained()[0].weight.grad, trained()
    model[0].weight = nn.Parameter(model[0].weight.detach().chunk(2, 1)[rank].clone())
    model[0].weight.grad = gradient.chunk(2, 1)[rank].clone()
    for parameter in model[2].parameters():
        parameter.grad *= 0.25 if rank else 0.75
    alone = [dist.new_group([one]) for one in range(2)][rank]
    shards = TensorShards(model, {"0.weight": 1, "2.*": ParameterShard(gradient_is_partial=True)}, dist.group.WORLD)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(folder / "tp", model, optimizer, ranks=alone, shards=shards, gradients="full")
    before = [parameter.grad.clone() for parameter in model.parameters()]
    recorder.note(1.5, counts={"documents": 6})
    optimizer.step()
    recorder.step(1.5)
    return all(torch.equal(parameter.grad, grad) for parameter, grad in zip(model.parameters(), before, strict=True))


def test_a_model_that_is_sharded_over_tp_is_recorded_whole(tmp_path):
    assert run_ranks(train_on_tp, 2, tmp_path / "ranks", tmp_path) == [True, True], "gradients are only read"
    model, context = trained(), files.read_context(tmp_path / "tp")
    shapes = {name: tuple(entry["shape"]) for name, entry in context["observed"]["parameters"].items()}
    assert shapes == {name: tuple(value.shape) for name, value in model.named_parameters()}
    assert context["observed"]["sharded"] is True
    step, later = steps_of(tmp_path / "tp")
    assert (step["loss"], step["counts"]) == (1.5, {"documents": 6.0}), "neighbours have the same documents"
    assert step["gradient_norms"] == pytest.approx(norms_of(model), rel=1e-13)
    assert step["observed"]["weights"] != later["observed"]["weights"]
    gradients = files.read_tensors(tmp_path / "tp", 0, "gradients")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-13, atol=1e-16)


def test_ranks_write_one_record_of_the_whole_step(tmp_path):
    answers = run_ranks(train_on_ranks, 2, tmp_path / "ranks", tmp_path, timeout_s=120)
    assert answers[0] == answers[1] == ["record.json", "steps.jsonl", "tensors"]
    assert steps_of(tmp_path / "none") == []
    [step] = steps_of(tmp_path / "halves")
    assert "no_gradient" not in step, "a rank had one"
    [step] = steps_of(tmp_path / "tp")
    assert (step["loss"], step["counts"]) == (3.0, {"documents": 6.0}), "neighbours on tp hold the same documents"
    assert files.read_tensors(tmp_path / "tp", 0, "tokens")["ratios"].tolist() == [1.0, 1.0, 1.0]
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for number in range(2):
        optimizer.zero_grad()
        loss = loss_of(model, DATA)
        loss.backward()
        for name in ("ddp", "fsdp2", "sum"):
            step = steps_of(tmp_path / name)[number]
            assert step["loss"] == pytest.approx(loss.item(), rel=1e-13), name
            assert step["counts"] == {"documents": 6.0, "masked_documents": 1.0}, name
            assert step["metrics"] == {"rank": 0.0}, name
            assert step["gradient_norms"] == pytest.approx(norms_of(model), rel=1e-13), name
            gradients = files.read_tensors(tmp_path / name, number, "gradients")
            assert list(step["gradient_norms"]) == [key for key, _ in model.named_parameters()], name
            for key, parameter in model.named_parameters():
                torch.testing.assert_close(gradients[key], parameter.grad, rtol=1e-12, atol=1e-16)
            tokens = files.read_tensors(tmp_path / name, number, "tokens")
            expected = [-1.0, -2.0] if name == "sum" else [-2.0, -1.0, -3.0, -2.0]
            assert tokens["policy_logprobs"].tolist() == expected, name
        optimizer.step()


def test_a_metric_of_every_micro_batch_is_recorded_as_one_of_parts(tmp_path):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(tmp_path / "record", model, optimizer) as recorder:
        for kl in (0.5, 0.25):
            model(torch.ones(3, 2)).sum().backward()
            recorder.note(metrics={"loss/kl": kl, "learning_rate": 0.1})
        optimizer.step()
        model(torch.ones(3, 2)).sum().backward()
        recorder.note(metrics={"loss/kl": 0.125})
        optimizer.step()
    first, second = steps_of(tmp_path / "record")
    assert first["metrics"] == {"loss/kl": 0.25, "learning_rate": 0.1}
    assert first["partial_metrics"] == ["loss/kl"]
    assert "partial_metrics" not in second
