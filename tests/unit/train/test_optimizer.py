"""The optimizer against torch's and against loops over single numbers; rounding at random; the loss scale."""

import math
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.helpers.online_runs import done
from tests.helpers.ranks import run_ranks
from workbench.errors import SpecError
from workbench.policy.model import load_policy
from workbench.sharding.data_parallel import is_shard
from workbench.specs.precision import PRESETS
from workbench.specs.run import RunSpec
from workbench.train.optimizer import AdamW, FusedAdamW, LossScale, build_optimizer, eight_bit_moments, round_at_random


def weights_after(kind, dtype, steps=5, **settings):
    draw = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(40, generator=draw, dtype=torch.float64).to(dtype))
    optimizer = kind([parameter], lr=1e-2, weight_decay=0.1, **settings)
    for _ in range(steps):
        parameter.grad = torch.randn(40, generator=draw, dtype=torch.float64).to(dtype)
        optimizer.step()
    return parameter.detach(), optimizer.state[parameter]


@pytest.mark.parametrize(("dtype", "bar"), [(torch.float64, 1e-15), (torch.float32, 1e-6)])
def test_with_one_dtype_it_is_the_adamw_of_torch(dtype, bar):
    expected, state = weights_after(torch.optim.AdamW, dtype)
    actual, own = weights_after(AdamW, dtype, moments=dtype)
    torch.testing.assert_close(actual, expected, rtol=bar, atol=bar)
    torch.testing.assert_close(own["exp_avg_sq"], state["exp_avg_sq"], rtol=bar, atol=bar)


def rounded(x):
    return float(torch.tensor(x, dtype=torch.float64).float().bfloat16())


def test_moments_in_bfloat16_are_rounded_once_a_step():
    """The paper's update on single numbers in float64, with moments rounded between steps."""
    draw = torch.Generator().manual_seed(0)
    weights = torch.randn(40, generator=draw, dtype=torch.float64).float().double().tolist()
    means, squares = [0.0] * 40, [0.0] * 40
    for step in range(1, 6):
        gradients = torch.randn(40, generator=draw, dtype=torch.float64).float().double().tolist()
        for i, g in enumerate(gradients):
            mean, square = 0.9 * means[i] + 0.1 * g, 0.999 * squares[i] + 0.001 * g * g
            move = mean / (1 - 0.9**step) / (math.sqrt(square / (1 - 0.999**step)) + 1e-8)
            weights[i] = weights[i] * (1 - 1e-2 * 0.1) - 1e-2 * move
            means[i], squares[i] = rounded(mean), rounded(square)
    actual, state = weights_after(AdamW, torch.float32, moments=torch.bfloat16)
    torch.testing.assert_close(actual.double(), torch.tensor(weights, dtype=torch.float64), rtol=2e-6, atol=2e-6)
    assert state["exp_avg"].dtype == torch.bfloat16
    plain, _ = weights_after(torch.optim.AdamW, torch.float32)
    assert float((actual - plain).abs().max()) > 2e-5, "rounded moments move weights"


def test_rounding_at_random_is_right_on_average_and_never_further_than_a_neighbour():
    values = torch.tensor([1.0 + 2**-9, -3.0 - 2**-8, 1e-30, 2.5, 0.0, -0.1])
    draw = torch.Generator().manual_seed(0)
    rounds = torch.stack(
        [round_at_random(values, torch.randint(0, 2**16, (6,), generator=draw)).double() for _ in range(4000)]
    )
    gap = values.double().abs() * 2**-7
    assert ((rounds - values.double()).abs() <= gap).all()
    assert ((rounds.mean(0) - values.double()).abs() <= 4 * gap / math.sqrt(4000)).all()
    assert set(rounds[:, 0].tolist()) == {1.0, 1.0 + 2**-7}
    assert set(rounds[:, 3].tolist()) == {2.5}, "a number of bfloat16 stays"


def test_rounding_at_random_keeps_what_is_not_finite():
    values = torch.tensor([math.inf, -math.inf, math.nan, torch.finfo(torch.float32).max])
    result = round_at_random(values, torch.full((4,), 2**16 - 1))
    assert result[:2].tolist() == [math.inf, -math.inf]
    assert math.isnan(result[2])
    assert result[3] == math.inf, "beyond the largest number of bfloat16"


def test_updates_below_half_a_gap_are_lost_to_the_nearest_and_kept_at_random():
    moved = {}
    for at_random in (False, True):
        settings = {"moments": "float32", "stochastic_rounding": at_random}
        spec = RunSpec(precision="bfloat16", mixed_precision=settings, optimizer={"learning_rate": 1e-5})
        policy = load_policy("tiny-qwen3", precision=spec.dtypes)
        [norm] = [p for name, p in policy.model.named_parameters() if name == "model.norm.weight"]
        optimizer = build_optimizer(policy, spec)
        for _ in range(200):
            norm.grad = torch.ones_like(norm)
            optimizer.step()
        moved[at_random] = float((1 - norm.detach().float()).mean())
    assert moved[False] == 0.0
    assert moved[True] == pytest.approx(200 * 1e-5, rel=0.5)


@pytest.mark.parametrize("name", ["float32", "float64", "bfloat16", "bf16_mixed"])
def test_torch_has_the_optimizer_of_presets_with_one_dtype_for_weights_and_moments(name):
    spec = RunSpec(precision=name)
    assert type(build_optimizer(load_policy("tiny-qwen3", precision=spec.dtypes), spec)) is torch.optim.AdamW


def two_steps():
    """Weights after two steps of the fused optimizer on DTensors of two ranks, and of torch's on plain tensors."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    draw = torch.Generator().manual_seed(0)
    whole, *gradients = (torch.randn(5, 3, generator=draw, dtype=torch.float64) for _ in range(3))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded, plain = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])), nn.Parameter(whole.clone())
    settings = {"lr": 0.1, "weight_decay": 0.1}
    fused, single = FusedAdamW([sharded], fused=True, **settings), torch.optim.AdamW([plain], foreach=False, **settings)
    for gradient in gradients:
        sharded.grad, plain.grad = distribute_tensor(gradient, mesh, [Shard(0)]), gradient
        fused.step()
        single.step()
    lists: tuple[list, ...] = ([], [], [], [], [], [])
    fused._init_group(fused.param_groups[0], *lists)
    assert [len(some) for some in lists] == [1, 1, 1, 1, 0, 1]
    assert not any(is_shard(value) for some in lists for value in some), "kernels get plain tensors"
    assert fused.state[sharded]["exp_avg"].shape == (5, 3), "states stay DTensors, as checkpoints gather them"
    return sharded.full_tensor().detach(), plain.detach()


def test_the_fused_optimizer_updates_the_shards_of_dtensors(tmp_path):
    for sharded, plain in run_ranks(two_steps, 2, tmp_path):
        torch.testing.assert_close(sharded, plain, rtol=1e-14, atol=1e-14)


# ---- loss scale --------------------------------------------------------------------------------------------------


def test_a_scale_is_halved_by_a_gradient_that_is_not_finite_and_doubled_after_its_interval():
    scale = LossScale(value=8.0, interval=3)
    seen = [(scale.accepts(norm), scale.value) for norm in (1.0, 1.0, math.inf, 1.0, 1.0, 1.0, math.nan)]
    assert seen == [
        (True, 8.0),
        (True, 8.0),
        (False, 4.0),
        (True, 4.0),
        (True, 4.0),
        (True, 8.0),
        (False, 4.0),
    ]


def test_without_a_setting_no_step_is_skipped():
    assert LossScale.of(PRESETS["bf16_mixed"]).accepts(math.nan)


FP16 = {"precision": "fp16_amp", "steps": 4, "record": {"checkpoint_every": 1}}


def test_steps_that_overflow_are_skipped_and_recorded_and_a_resumed_run_keeps_its_scale(tmp_path):
    overflowing = {"mixed_precision": {"loss_scale": 2.0**40, "loss_scale_interval": 2}}
    whole = done(tmp_path, "whole", **FP16 | overflowing)
    scales = [step["precision/loss_scale"] for step in whole.steps()]
    skipped = [step["precision/skipped"] for step in whole.steps()]
    assert skipped == [1.0, 1.0, 1.0, 1.0]
    assert scales == [2.0**40, 2.0**39, 2.0**38, 2.0**37]
    start = load_policy("tiny-qwen3").model.state_dict()
    kept = whole.checkpoints()[4]
    for name, value in load_file(kept / "weights.safetensors").items():
        assert torch.equal(value, start[name]), "no step was taken"
    more = done(tmp_path, "whole", continues=whole.path.name, **FP16 | overflowing | {"steps": 6})
    assert [step["precision/loss_scale"] for step in more.steps()][4:] == [2.0**36, 2.0**35]


@pytest.mark.parametrize("name", ["bf16_mixed", "fp16_amp", "bf16_pure", "fp32", "fsdp2_bf16", "deepspeed_bf16"])
def test_each_preset_trains_online(name, tmp_path):
    run = done(tmp_path, "online", precision=name, steps=2)
    norms = [step["gradient/norm/global"] for step in run.steps()]
    assert all(0 < norm < math.inf for norm in norms)
    assert [step.get("precision/skipped", 0.0) for step in run.steps()] == [0.0, 0.0]
    ratios = [step["ratio/mean"] for step in run.steps() if "ratio/mean" in step]
    assert all(ratio == 1.0 for ratio in ratios), "the old policy's pass uses the same copies"


def quantised(values, *, signed):
    """Blocks of 256 by the definition: the nearest of 256 numbers, relative to the largest of the block."""
    from torchao.optim.quant_utils import create_dynamic_map

    numbers = torch.tensor(create_dynamic_map(signed=signed))
    result = []
    for block in values.float().reshape(-1, 256):
        scale = block.abs().max().clamp_min(1e-12)
        nearest = ((block / scale)[:, None] - numbers).abs().argmin(1)
        result.append(numbers[nearest] * scale)
    return torch.cat(result).view(values.shape)


def test_moments_of_8_bits_are_rounded_once_a_step():
    pytest.importorskip("torchao")
    draw = torch.Generator().manual_seed(0)
    large, small = (torch.nn.Parameter(torch.randn(size, generator=draw)) for size in ((64, 64), (100,)))
    optimizer = AdamW([large, small], lr=1e-2, weight_decay=0.0, moments=eight_bit_moments())
    mean, square, weight = torch.zeros(64, 64), torch.zeros(64, 64), large.detach().clone()
    for step in range(1, 5):
        large.grad, small.grad = (torch.randn(each.shape, generator=draw) for each in (large, small))
        mean = 0.9 * mean + 0.1 * large.grad
        square = 0.999 * square + 0.001 * large.grad**2
        weight -= 1e-2 * (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)
        mean, square = quantised(mean, signed=True), quantised(square, signed=False)
        optimizer.step()
    apart = (large.detach() - weight).abs()
    assert float(apart.mean()) < 1e-6, "a tie of two codes may be decided otherwise, in single numbers"
    assert optimizer.state[large]["exp_avg"].codes.dtype == torch.uint8
    assert optimizer.state[small]["exp_avg"].dtype == torch.float32, "small parameters keep theirs"


def test_8_bits_without_torchao_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim.subclass_8bit", None)
    with pytest.raises(SpecError, match=r"pip install 'workbench\[eight_bit\]'"):
        build_optimizer(load_policy("tiny-qwen3"), RunSpec(mixed_precision={"moments": "8bit"}))
