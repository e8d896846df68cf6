"""The experiment's own sampler, and what it plants."""

import pytest
import torch

from experiments.attribution.cases import Bench, Engine, clean, decoder, fp8_weights, in_dtype, pairs, prompts, singles
from workbench.mismatch.factors import BY_NAME
from workbench.mismatch.settings import sides


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench("qwen3", "small", tmp_path_factory.mktemp("adapters"), count=3, tokens=4)


def test_values_of_a_draw_and_of_one_pass_are_the_same(bench):
    settings = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
    drawn = Engine(bench.model, **settings).draw(bench.rows, 4, 0)
    again = Engine(bench.model, **settings, again=True).draw(bench.rows, 4, 0)
    for (ids, nats), (same, others) in zip(drawn, again, strict=True):
        assert ids == same
        assert nats == pytest.approx(others, abs=1e-5)


def test_raw_and_scaled_values_by_hand(bench):
    [(ids, nats)] = Engine(bench.model, temperature=0.5, values="raw").draw(bench.rows[:1], 1, 0)
    with torch.no_grad():
        logits = bench.model(torch.tensor([bench.rows[0]])).logits[0, -1]
    assert nats[0] == pytest.approx(float(torch.log_softmax(logits, -1)[ids[0]]), abs=1e-5)
    [(ids, nats)] = Engine(bench.model, temperature=0.5, values="scaled").draw(bench.rows[:1], 1, 0)
    assert nats[0] == pytest.approx(float(torch.log_softmax(logits / 0.5, -1)[ids[0]]), abs=1e-5)


def test_the_cases_plant_every_factor_and_can_be_read(bench):
    moe = Bench("moe", "small", bench.folder / "moe", count=3, tokens=4)
    planted = set()
    for own in (bench, moe):
        for build in [*singles(own).values(), *pairs(own).values()]:
            case = build()
            sides(case.trainer, case.sampler)
            planted |= set(case.factors)
    assert planted == set(BY_NAME)


def test_clean_cases_are_drawn_and_stated(bench):
    cases = [clean(bench, number) for number in range(6)]
    assert len({case.name for case in cases}) == 6
    assert all(case.factors == () and case.sampler["temperature"] in (0.6, 0.8, 1.0) for case in cases)


def test_rotary_frequencies_stay_and_weights_are_rounded():
    model = decoder("llama", "small", 0)
    half = in_dtype(model, torch.bfloat16)
    assert half.model.rotary_emb.inv_freq.dtype == torch.float32
    assert half.lm_head.weight.dtype == torch.bfloat16
    rounded = fp8_weights(model, by_channel=True)
    row, before = (m.model.layers[0].mlp.up_proj.weight[0].detach() for m in (rounded, model))
    assert 0 < float((row - before).abs().max()) < 0.07 * float(before.abs().max())
    assert torch.equal(rounded.lm_head.weight, model.lm_head.weight)
    assert len({len(row) for row in prompts(12, 2)}) > 1
