"""Layers in pieces: their results, their weight gradients, and the same bits under tp."""

import pytest
import torch
from torch import nn

from workbench.reproducible import modules
from workbench.reproducible.exact_sums import Accumulator, Leaves
from workbench.reproducible.kernels import plain
from workbench.reproducible.modules import Pieces
from workbench.sharding.mesh import Axis
from workbench.sharding.simulated import simulate

ONE = Pieces(plain, 4, 1, Axis("tp"))


def sums(parameter, bits=40):
    one = Accumulator(parameter.shape, parameter.device, Leaves())
    one.start(bits)
    return one


def gradient(one):
    return one.total.double() / one.scale


@pytest.mark.parametrize("by_outputs", [True, False])
@pytest.mark.parametrize("here", [1, 2, 4])
def test_a_linear_layer_in_pieces_is_a_linear_layer(by_outputs, here):
    x, dy = torch.randn(1, 12, 8, requires_grad=True), torch.randn(1, 12, 4)
    layer = nn.Linear(8, 4)
    layer(x).backward(dy)
    weight, bias, own_x = layer.weight.detach(), layer.bias.detach(), x.detach().clone().requires_grad_()
    into, into_bias = sums(weight), sums(bias)
    y = modules.linear(own_x, weight, bias, by_outputs, (into, into_bias), Pieces(plain, 4, here, Axis("tp")))
    y.backward(dy)
    torch.testing.assert_close(y, layer(x))
    torch.testing.assert_close(own_x.grad, x.grad)
    torch.testing.assert_close(gradient(into).float(), layer.weight.grad)
    torch.testing.assert_close(gradient(into_bias).float(), layer.bias.grad)
    assert float(into.peak) == pytest.approx(
        max(float((dy[0, at : at + 4].T @ x.detach()[0, at : at + 4]).abs().max()) for at in (0, 4, 8)), rel=1e-5
    )
    assert float(into_bias.peak) == float(dy.abs().max())


@pytest.mark.parametrize("by_outputs", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_over_tp_a_linear_layer_is_the_same_bits(by_outputs, dtype):
    draw = torch.Generator().manual_seed(2)
    x, dy, weight = (torch.randn(*shape, generator=draw).to(dtype) for shape in ((1, 8, 16), (1, 8, 12), (12, 16)))
    dim = 0 if by_outputs else 1

    def layer(mesh):
        tp = mesh["tp"]

        def mine(values, dim):
            return values.chunk(tp.size, dim)[tp.rank].contiguous()

        own_x = (x if by_outputs else mine(x, 2)).clone().requires_grad_()
        own_weight = mine(weight, dim)
        into = sums(own_weight)
        y = modules.linear(own_x, own_weight, None, by_outputs, (into, None), Pieces(plain, 4, 4 // tp.size, tp))
        y.backward(mine(dy, 2) if by_outputs else dy)
        return y.detach(), own_x.grad, into.total

    (alone,) = simulate(layer)
    for tp in (2, 4):
        y, dx, total = zip(*simulate(layer, tp=tp), strict=True)
        assert torch.equal(torch.cat(y, 2) if by_outputs else y[0], alone[0])
        assert torch.equal(dx[0] if by_outputs else torch.cat(dx, 2), alone[1])
        assert torch.equal(torch.cat(total, dim), alone[2])


@pytest.mark.parametrize("shape", [(1, 8, 6), (1, 8, 3, 5)])
def test_a_norm_is_a_norm_and_each_row_is_alone(shape):
    x, weight = torch.randn(shape, requires_grad=True), torch.rand(shape[-1], requires_grad=True)
    dy = torch.randn(shape)
    expected = weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    expected.backward(dy)
    own_x, into = x.detach().clone().requires_grad_(), sums(weight)
    y = modules.rms_norm(own_x, weight.detach(), 1e-6, into, ONE)
    y.backward(dy)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(own_x.grad, x.grad)
    torch.testing.assert_close(gradient(into).float(), weight.grad)
    row = modules.rms_norm(x.detach()[:, 5:6].clone(), weight.detach(), 1e-6, sums(weight), ONE)
    assert torch.equal(row, y.detach()[:, 5:6])


def test_an_embedding_over_tp_looks_up_and_counts_every_token():
    weight, tokens, dy = torch.randn(6, 3), torch.tensor([[0, 5, 3, 3, 2, 5, 5, 1]]), torch.randn(1, 8, 3)
    weight[5, 1] = -0.0
    expected = torch.zeros(6, 3).index_add(0, tokens[0], dy[0])

    def look_up(mesh):
        tp = mesh["tp"]
        own = weight.chunk(tp.size)[tp.rank].clone().requires_grad_()
        into = sums(own)
        y = modules.embedding(tokens, own, tp.rank * len(own), into, Pieces(plain, 4, 1, tp))
        y.backward(dy)
        assert own.grad is None
        return y.detach(), into.total

    (alone,) = simulate(look_up)
    assert torch.equal(alone[0], weight[tokens])
    torch.testing.assert_close(alone[1].double().mul(2.0**-40).float(), expected)
    by_rank = simulate(look_up, tp=2)
    for y, _ in by_rank:
        assert torch.equal(y.view(torch.int32), alone[0].view(torch.int32))
    assert torch.equal(torch.cat([total for _, total in by_rank]), alone[1])


def test_an_activation_by_pieces_is_that_of_each_element():
    x = torch.randn(1, 8, 37, requires_grad=True)
    dy = torch.randn(1, 8, 37)
    nn.functional.silu(x).backward(dy)
    own_x = x.detach().clone().requires_grad_()
    y = modules.elementwise(own_x, nn.functional.silu, ONE)
    y.backward(dy)
    torch.testing.assert_close(y, nn.functional.silu(x))
    torch.testing.assert_close(own_x.grad, x.grad)
