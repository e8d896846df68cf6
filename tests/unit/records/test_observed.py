"""What a recorder sees by itself, in loops whose settings, weights and modes are known."""

import gc
import weakref

import pytest
import torch
from torch import nn

from tests.helpers.ranks import run_ranks
from workbench.records import trainer_files as files
from workbench.records.observed import checksum, config_of, drops
from workbench.records.recorder import Recorder
from workbench.records.watching import CLIPPING

DATA = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def model_of(seed=0, dropout=0.0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Dropout(dropout), nn.Tanh(), nn.Linear(5, 1))


def loss_of(model):
    return model(DATA).square().mean()


def trained(folder, model, optimizer, steps=2, before_step=lambda: None, **more):
    with Recorder(folder, model, optimizer, **more) as recorder:
        for _ in range(steps):
            model.zero_grad()
            loss = loss_of(model)
            loss.backward()
            recorder.note(loss)
            before_step()
            for each in optimizer if isinstance(optimizer, list) else [optimizer]:
                each.step()
    return files.read_context(folder)["observed"], [step["observed"] for step in files.read_steps(folder)]


def test_settings_weights_and_dtypes_of_every_step(tmp_path):
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.8, 0.9), weight_decay=0.3)
    initial = checksum(dict(model.named_parameters()))
    start, steps = trained(tmp_path / "mine", model, optimizer)
    assert start["optimizers"] == ["AdamW"]
    assert start["parameters"]["0.weight"] == {"shape": [5, 4], "dtype": "float32", "trains": True}
    assert (start["tied"], start["left_out"]) == ([], [])
    assert start["weights"] == initial == steps[0]["weights"] != steps[1]["weights"]
    [[group]] = steps[0]["optimizers"]
    assert (group["lr"], group["betas"], group["weight_decay"], group["eps"]) == (0.1, [0.8, 0.9], 0.3, 1e-8)
    assert steps[0]["dtypes"] == {"gradients": ["float32"], "state": []}
    assert steps[1]["dtypes"] == {"gradients": ["float32"], "state": ["float32"]}


def test_a_schedule_is_seen_step_by_step(tmp_path):
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rates = iter((0.1, 0.05))

    def schedule():
        optimizer.param_groups[0]["lr"] = next(rates)

    _, steps = trained(tmp_path / "mine", model, optimizer, before_step=schedule)
    assert [step["optimizers"][0][0]["lr"] for step in steps] == [0.1, 0.05]


def test_parameters_that_are_frozen_tied_or_left_out(tmp_path):
    model = model_of()
    model.add_module("again", nn.Linear(4, 5))
    model.again.weight = model[0].weight
    model[3].bias.requires_grad_(False)
    start, _ = trained(tmp_path / "mine", model[:4], torch.optim.SGD([model[0].weight], lr=0.1), steps=1)
    assert not start["parameters"]["3.bias"]["trains"]
    assert start["left_out"] == ["0.bias", "3.weight"]
    recorder = Recorder(tmp_path / "tied", model)
    assert files.read_context(tmp_path / "tied")["observed"]["tied"] == [["0.weight", "again.weight"]]
    recorder.close()


def test_dropout_counts_where_it_drops():
    assert drops(nn.Dropout(0.1))
    assert not drops(nn.Dropout(0.1).eval())
    assert not drops(nn.Dropout(0.0))


def clipped_at_once(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.001)


def clipped_with_norm(model):
    """As torchtitan, which adds the norms of pipeline stages up."""
    norm = nn.utils.get_total_norm([value.grad for value in model.parameters()])
    nn.utils.clip_grads_with_norm_(model.parameters(), max_norm=0.001, total_norm=norm)


def clipped_as_by_verl(model):
    from torch.nn.utils.clip_grad import _clip_grads_with_norm_, _get_total_norm

    _clip_grads_with_norm_(
        list(model.parameters()), 0.001, _get_total_norm([value.grad for value in model.parameters()])
    )


@pytest.fixture
def nobody_watches(monkeypatch):
    """Torch's functions without the wrappers of recorders of earlier tests, which live as long as their models."""
    for module, name in (*CLIPPING, (torch.autograd, "backward")):
        if (current := getattr(module, name, None)) is not None:
            while hasattr(current, "watchers"):
                current = current.__wrapped__
            monkeypatch.setattr(module, name, current)


@pytest.mark.usefixtures("nobody_watches")
@pytest.mark.parametrize("way", [clipped_at_once, clipped_with_norm, clipped_as_by_verl])
def test_clipping_by_torch_is_seen_and_gradients_are_those_before(way, tmp_path):
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    correct, norms = nn.utils.clip_grad_norm_, []

    def clip():
        norms.append(float(model[0].weight.grad.norm()))
        way(model)
        assert float(model[0].weight.grad.norm()) < 0.0011, "clipped as without a recorder"

    _, steps = trained(tmp_path / "mine", model, optimizer, before_step=clip)
    assert [step["clip"] for step in steps] == [{"max_norm": 0.001}] * 2
    recorded = [step["gradient_norms"]["0.weight"] for step in files.read_steps(tmp_path / "mine")]
    assert recorded == pytest.approx(norms, rel=1e-6)
    assert nn.utils.clip_grad_norm_ is correct, "unwrapped at the end"
    assert not [name for module, name in CLIPPING if hasattr(getattr(module, name), "watchers")]


@pytest.mark.parametrize("taken", [True, False])
def test_a_gradient_that_changes_after_it_was_taken_is_seen_as_the_optimizer_gets_it(taken, tmp_path):
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []

    def clip():
        if taken:
            recorder.take_gradients()
        for number, parameter in enumerate(model.parameters()):
            parameter.grad.mul_(0.5 if number else 0.25)
        norms.append(float(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()))

    with Recorder(tmp_path / "mine", model, optimizer) as recorder:
        for _ in range(2):
            model.zero_grad()
            loss_of(model).backward()
            clip()
            optimizer.step()
    given = [step["observed"].get("given") for step in files.read_steps(tmp_path / "mine")]
    expected = [{"norm": pytest.approx(norm, rel=1e-6), "times": pytest.approx([0.25, 0.5])} for norm in norms]
    assert given == (expected if taken else [None, None])


def test_tensors_that_the_optimizers_state_keeps_are_named_unless_they_are_all_zero(tmp_path):
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    steps = iter(range(3))

    def lose():
        if next(steps) == 2:
            for kept in optimizer.state.values():
                kept["momentum_buffer"].zero_()

    _, seen = trained(tmp_path / "mine", model, optimizer, steps=3, before_step=lose)
    assert [step["kept"] for step in seen] == [[], ["momentum_buffer"], []]


def test_one_changed_bit_or_two_swapped_rows_change_the_checksum():
    weight = nn.Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)))
    before = checksum({"w": weight})
    with torch.no_grad():
        weight.view(torch.int32)[3, 2] ^= 1
    changed = checksum({"w": weight})
    with torch.no_grad():
        weight.view(torch.int32)[3, 2] ^= 1
        weight.copy_(weight[[1, 0, 2, 3, 4, 5]])
    assert len({before, changed, checksum({"w": weight})}) == 3
    assert checksum({"w": nn.Parameter(weight[:0])}) == checksum({"w": nn.Parameter(torch.empty(0, 4))})


def test_a_checksum_does_not_depend_on_where_the_numbers_lie():
    values = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    buffer = torch.empty(33)
    buffer[1:] = values.flatten()
    assert checksum({"w": buffer[1:].view(8, 4)}) == checksum({"w": values})


def test_gradients_that_were_there_before_a_step_are_seen(tmp_path):
    seen = {}
    for clear in (True, False):
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Recorder(tmp_path / str(clear), model, optimizer):
            for _ in range(2):
                for _ in range(2):  # the second micro-batch meets the gradient of the first: that is none of before
                    loss_of(model).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False) if clear else None
        seen[clear] = [step["observed"]["cleared"] for step in files.read_steps(tmp_path / str(clear))]
    assert seen == {True: [True, True], False: [True, False]}


def test_updates_that_the_state_has_counted(tmp_path):
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    _, steps = trained(tmp_path / "kept", model, optimizer, steps=3)
    assert [step["updates"] for step in steps] == [0, 1, 2]
    _, steps = trained(tmp_path / "lost", model, optimizer, steps=2, before_step=optimizer.state.clear)
    assert [step["updates"] for step in steps] == [0, 0]


def test_gradients_on_the_grid_of_bfloat16_and_evaluation_mode_are_seen(tmp_path):
    model = model_of().eval()

    def rounded():
        for parameter in model.parameters():
            parameter.grad.copy_(parameter.grad.bfloat16())

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(tmp_path / "mine", model, optimizer):
        for change in (lambda: None, rounded):
            model.zero_grad()
            loss_of(model).backward()
            change()
            optimizer.step()
    steps = [step["observed"] for step in files.read_steps(tmp_path / "mine")]
    assert [step["gradient_grid"] for step in steps] == [None, "bfloat16"]
    assert [step["training"] for step in steps] == [False, False]


def test_losses_are_seen_where_none_is_noted_and_are_those_of_this_model(tmp_path):
    model, critic = model_of(), model_of(seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(tmp_path / "mine", model, optimizer) as recorder:
        for noted in (False, True):
            model.zero_grad()
            expected = []
            for part in (0.25, 0.75):
                loss_of(critic).backward()  # of another model
                loss = part * loss_of(model)
                loss.backward()
                expected.append(loss.item())
            model(DATA).sum().backward(torch.tensor(0.0))  # from a given gradient: no loss
            recorder.note(5.0) if noted else None
            optimizer.step()
            if not noted:
                first = sum(expected)
    losses = [step["loss"] for step in files.read_steps(tmp_path / "mine")]
    assert losses == [pytest.approx(first), 5.0]
    loss_of(model).backward()  # after the end nothing is watched
    assert len(files.read_steps(tmp_path / "mine")) == 2


# ---- optimizers that do more than step --------------------------------------------------------------------------


def test_a_closure_is_recorded_after_its_first_call(tmp_path):
    model, expected = model_of(), model_of()
    optimizer, calls = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3), []
    with Recorder(tmp_path / "mine", model, optimizer):

        def closure():
            calls.append(1)
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss

        optimizer.step(closure)
    loss = loss_of(expected)
    loss.backward()
    [step] = files.read_steps(tmp_path / "mine")
    assert len(calls) > 1
    assert step["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert step["gradient_norms"]["0.weight"] == pytest.approx(float(expected[0].weight.grad.norm()), rel=1e-6)


def test_several_optimizers_are_one_step_each_with_its_own_gradients(tmp_path):
    """The first one's gradients are cleared before the second steps, as in loops that alternate."""
    model, expected = model_of(), model_of()
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[3]))
    loss_of(expected).backward()
    with Recorder(tmp_path / "mine", model, [first, second]):
        loss_of(model).backward()
        first.step()
        first.zero_grad()
        second.step()
    [step] = files.read_steps(tmp_path / "mine")
    norms = {name: float(value.grad.norm()) for name, value in expected.named_parameters()}
    assert step["gradient_norms"] == pytest.approx(norms, rel=1e-6)
    assert [group[0]["lr"] for group in step["observed"]["optimizers"]] == [0.1, 0.1]


def test_optimizers_that_alternate_clip_and_step_with_gradients_of_their_own(tmp_path):
    """As a generator and a critic: the second's gradients do not exist yet when the first's are clipped."""
    model, norms = model_of(), {}
    parts = {"0": model[0], "3": model[3]}
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts.values()]
    with Recorder(tmp_path / "mine", model, optimizers):
        for optimizer, (name, part) in zip(optimizers, parts.items(), strict=True):
            model.zero_grad()
            loss_of(model).backward()
            norms |= {f"{name}.{key}": float(value.grad.norm()) for key, value in part.named_parameters()}
            nn.utils.clip_grad_norm_(part.parameters(), 1e-3)
            optimizer.step()
    [step] = files.read_steps(tmp_path / "mine")
    assert step["gradient_norms"] == pytest.approx(norms, rel=1e-6)


def test_an_optimizer_without_gradients_is_no_error_where_another_has_some(tmp_path):
    model = model_of()
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[3]))
    with Recorder(tmp_path / "mine", model, [first, second]):
        first.step()
        loss_of(model).backward()
        second.step()
    [step] = files.read_steps(tmp_path / "mine")
    assert step["no_gradient"] == ["0.weight", "0.bias"]
    assert step["gradient_norms"]["3.weight"] > 0


def test_a_closed_recorder_sees_no_clipping_even_below_another_one(tmp_path):
    model, correct = model_of(), nn.utils.clip_grad_norm_
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = (Recorder(tmp_path / name, model, optimizer) for name in ("first", "second"))
    first.close()
    loss_of(model).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert first._norms == {}
    assert set(second._norms) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    second.close()
    assert nn.utils.clip_grad_norm_ is correct, "both are unwrapped"


@pytest.mark.usefixtures("nobody_watches")
def test_a_recorder_that_nobody_closed_is_not_kept_alive(tmp_path):
    clip, backward = nn.utils.clip_grad_norm_, torch.autograd.backward
    model = model_of()
    recorder = Recorder(tmp_path / "mine", model, torch.optim.SGD(model.parameters(), lr=0.1))
    alive = weakref.ref(recorder)
    assert torch.autograd.backward is not backward
    del recorder, model
    gc.collect()
    assert alive() is None
    assert (nn.utils.clip_grad_norm_, torch.autograd.backward) == (clip, backward)


class Scaler:
    """As torch's GradScaler: it skips a step with a gradient that is not finite, and lowers its scale."""

    def __init__(self):
        self.scale = 4.0

    def get_scale(self):
        return self.scale


def test_what_was_noted_for_a_skipped_step_is_left_out(tmp_path):
    model, scaler = model_of(), Scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(tmp_path / "mine", model, optimizer, scaler=scaler) as recorder:
        loss_of(model).backward()
        recorder.note(torch.tensor(100.0), counts={"documents": 6})
        scaler.scale = 2.0  # skipped: no optimizer.step()
        model.zero_grad()
        loss = loss_of(model)
        loss.backward()
        recorder.note(loss, counts={"documents": 6})
        optimizer.step()
    [step] = files.read_steps(tmp_path / "mine")
    assert step["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert step["counts"] == {"documents": 6.0}
    assert (step["observed"]["skipped"], step["observed"]["scale"]) == (1, 2.0)


def test_losses_that_are_seen_are_without_the_scale_and_without_those_of_a_skipped_step(tmp_path):
    model, scaler = model_of(), Scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(tmp_path / "mine", model, optimizer, scaler=scaler):
        (100 * loss_of(model) * scaler.scale).backward()
        scaler.scale = 2.0  # skipped: no optimizer.step()
        model.zero_grad()
        loss = loss_of(model)
        (loss * scaler.scale).backward()
        optimizer.step()
    [step] = files.read_steps(tmp_path / "mine")
    assert step["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert step["observed"]["skipped"] == 1
    assert step["observed"]["cleared"] is True


# ---- ranks ------------------------------------------------------------------------------------------------------


def _rank(folder, apart):
    rank = torch.distributed.get_rank()
    model = model_of(seed=rank if apart else 0)
    recorder = Recorder(folder, model)
    loss_of(model).backward()
    recorder.step()


@pytest.mark.parametrize("apart", [False, True])
def test_replicas_that_differ_are_named(apart, tmp_path):
    run_ranks(_rank, 2, tmp_path / "ranks", tmp_path / "mine", apart)
    [step] = files.read_steps(tmp_path / "mine")
    expected = ["0.weight", "0.bias", "3.weight", "3.bias"] if apart else "equal"
    assert step["observed"]["replicas"] == expected


def _noted(folder):
    model = model_of()
    recorder = Recorder(folder, model)
    loss_of(model).backward()
    for _ in range(2):
        recorder.note(tokens={"trained": torch.tensor([True, False])})
    recorder.step()


def test_micro_batches_are_numbered_rank_by_rank(tmp_path):
    run_ranks(_noted, 2, tmp_path / "ranks", tmp_path / "mine")
    assert files.read_tensors(tmp_path / "mine", 0, "tokens")["rows"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_settings_of_a_config_that_may_change_numbers():
    class Config:
        def to_dict(self):
            rope = {"rope_theta": 5e5, "factors": [1.0, 2.0], 3: 4}
            no_effect = {"use_cache": True, "dtype": "float32", "_name": "x", "pad_token_id": 0, "label2id": {"a": 0}}
            return {"hidden": 8, "rope": rope, "bad": float("nan")} | no_effect

    inner, outer = torch.nn.Linear(2, 2), torch.nn.Module()
    outer.module = inner
    assert config_of(outer) == {}
    inner.config = Config()
    assert config_of(outer) == {"hidden": 8, "rope.rope_theta": 5e5}
    inner.config = {"scale": 0.5, "layers": [1, 2]}
    assert config_of(inner) == {"scale": 0.5}


def test_functions_in_a_config_are_the_same_in_every_process():
    model = torch.nn.Linear(2, 2)
    model.config = {"gate": str(config_of), "head": {"param_init": {"weight": str(config_of)}}}
    assert config_of(model) == {"gate": "<function config_of>"}
