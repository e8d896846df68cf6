"""What a recorder reads off the logits of a model and their gradients, without a note."""

import json

import pytest
import torch
from torch import nn

import workbench as wb
from workbench.records.outputs import ROW, Outputs, of_all_ranks

VOCABULARY, ROWS, WIDE = 30, 3, 7


class Tiny(nn.Module):
    """Scores of the next token, and a critic's value of each."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.value = nn.Linear(16, 1)

    def forward(self, ids, positions=None):
        hidden = torch.tanh(self.embedding(ids))
        return self.head(hidden), self.value(hidden)[..., 0]


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    draw = lambda: torch.randint(0, VOCABULARY, (ROWS, WIDE), generator=generator)  # noqa: E731
    ids, targets = draw(), draw()
    trained = torch.rand(ROWS, WIDE, generator=generator) < 0.6
    return ids, targets, trained, torch.randn(ROWS, 1, generator=generator)


def recorded(folder, batch, *, temperature=1.0, critic=0.0, positions=None, calls=1):
    ids, targets, trained, weights = batch
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with wb.Recorder(folder, model, optimizer):
        for _ in range(calls):
            logits, values = model(ids, positions)
            logprobs = (logits / temperature).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
            (-(weights * logprobs)[trained].sum() + critic * (values * trained).square().sum()).backward()
        optimizer.step()
    [line] = (folder / "steps.jsonl").read_text().splitlines()
    return json.loads(line)["observed"].get("outputs"), logits.detach().log_softmax(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_trained_predictions_weights_and_temperature_are_read_from_gradients(temperature, batch, tmp_path):
    seen, logprobs = recorded(tmp_path / "mine", batch, temperature=temperature)
    _, targets, trained, weights = batch
    assert seen["likelihoods"] == 1.0
    assert seen["slope"] == pytest.approx(1 / temperature, rel=1e-3)
    [rows] = seen["rows"]
    for at, row in enumerate(rows):
        known = dict(zip(ROW, row, strict=True))
        assert known["trained"] == int(trained[at].sum())
        assert known["weight"] == pytest.approx(float(weights[at] * trained[at].sum()) / temperature, rel=1e-3)
        of_target = logprobs[at].gather(-1, targets[at][:, None])[:, 0]
        assert known["logprob"] == pytest.approx(float(of_target[trained[at]].sum()), rel=1e-4)


def test_other_targets_and_places_have_other_sums(batch, tmp_path):
    ids, targets, trained, weights = batch
    names = [ROW.index("places"), ROW.index("targets")]
    one, _ = recorded(tmp_path / "one", batch)
    other, _ = recorded(tmp_path / "other", (ids, targets.roll(1, 1), trained, weights))
    moved, _ = recorded(tmp_path / "moved", (ids.roll(1, 1), targets.roll(1, 1), trained.roll(1, 1), weights))
    of = [[[row[name] for row in seen["rows"][0]] for name in names] for seen in (one, other, moved)]
    assert of[0][0] == of[1][0]
    assert of[0][1] != of[1][1]
    assert of[0][0] != of[2][0]
    assert of[0][1] == of[2][1]


def test_rows_begin_where_positions_do(batch, tmp_path):
    positions = torch.tensor([0, 1, 2, 0, 1, 2, 3]).expand(ROWS, -1)
    seen, _ = recorded(tmp_path / "mine", batch, positions=positions)
    [rows] = seen["rows"]
    assert len(rows) == 2 * ROWS
    assert [sum(pair) for pair in zip([r[0] for r in rows[::2]], [r[0] for r in rows[1::2]], strict=True)] == [
        int(each.sum()) for each in batch[2]
    ]


def test_a_critic_is_seen_beside_the_logits(batch, tmp_path):
    seen, _ = recorded(tmp_path / "mine", batch, critic=0.5)
    assert seen["values"][0] == int(batch[2].sum())
    assert recorded(tmp_path / "without", batch)[0]["values"][0] == 0


def test_each_call_has_its_rows(batch, tmp_path):
    seen, _ = recorded(tmp_path / "mine", batch, calls=2)
    assert [len(rows) for rows in seen["rows"]] == [ROWS, ROWS]


def test_of_a_call_that_is_back_propagated_twice_nothing_is_told(batch):
    ids, *_ = batch
    outputs, (logits, _) = Outputs(), Tiny()(ids)
    outputs.see(logits)
    logits.log_softmax(-1)[0, 0, 0].backward(retain_graph=True)
    assert outputs.finish()
    logits.log_softmax(-1)[0, 0, 1].backward()
    assert outputs.finish() == {}


def test_many_logits_are_read_in_part(batch, monkeypatch):
    monkeypatch.setattr("workbench.records.outputs.MOST", 2 * WIDE * VOCABULARY)
    outputs, (logits, _) = Outputs(), Tiny()(batch[0])
    outputs.see(logits)
    logits.log_softmax(-1)[..., 0].sum().backward()
    seen = outputs.finish()
    assert seen["every"] == 2
    assert sum(row[0] for row in seen["rows"][0]) == -(-ROWS * WIDE // 2)


def test_ranks_are_put_together_and_one_that_saw_nothing_leaves_nothing(batch, tmp_path):
    seen, _ = recorded(tmp_path / "mine", batch, critic=1.0)
    both = of_all_ranks([seen, seen])
    assert both["rows"] == 2 * seen["rows"]
    assert both["values"] == [2 * each for each in seen["values"]]
    assert of_all_ranks([seen, {}]) == {}


@pytest.mark.parametrize("bonus", [0.02, 0.5, -0.5])
def test_an_entropy_is_read_next_to_weights(bonus):
    """Weights are those of the likelihood alone, also where the entropy pulls harder; a weight of 0 has no target."""
    torch.manual_seed(0)
    logits = (2 * torch.randn(ROWS, WIDE, VOCABULARY)).requires_grad_()
    targets, weights = torch.randint(0, VOCABULARY, (ROWS, WIDE)), torch.randn(ROWS, WIDE)
    weights[0, :2] = 0.0
    seen = Outputs()
    seen.see(logits)
    logprobs = logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum()
    (-(weights * logprobs.gather(-1, targets[..., None])[..., 0]).sum() - bonus * entropy).backward()
    found = seen.finish()
    assert found["likelihoods"] == 1.0
    assert found["bonus"] == pytest.approx(bonus, rel=1e-4)
    [rows] = found["rows"]
    for at, row in enumerate(rows):
        known = dict(zip(ROW, row, strict=True))
        assert known["weight"] == pytest.approx(float(weights[at].sum()), abs=1e-4)
        assert known["size"] == pytest.approx(float(weights[at].abs().sum()), abs=1e-4)
        assert known["clear"] <= WIDE - (2 if at == 0 else 0)


@pytest.mark.parametrize("shift", [0, 1, 2])
def test_targets_are_found_among_the_ids(shift):
    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (ROWS, WIDE))
    logits = torch.randn(ROWS, WIDE, VOCABULARY, requires_grad=True)
    seen = Outputs()
    seen.see(logits, ids=ids)
    kept = WIDE - shift
    logits[:, :kept].log_softmax(-1).gather(-1, ids[:, shift:, None]).sum().backward()
    clear, *at = seen.finish()["after"]
    assert clear == at[shift] == ROWS * kept
    assert max(count for k, count in enumerate(at) if k != shift) < clear / 4


@pytest.mark.parametrize("output", ["hidden", "losses"])
def test_hidden_states_and_losses_of_tokens_are_no_logits(output, batch):
    """As of a model whose head a chunked loss calls, and of one that is given labels."""
    ids, targets, trained, _ = batch
    model, seen = Tiny(), Outputs()
    hidden = torch.tanh(model.embedding(ids))
    logprobs = model.head(hidden).log_softmax(-1)
    losses = -logprobs.gather(-1, targets[..., None])[..., 0].T.repeat(1, 3)
    seen.see(hidden if output == "hidden" else losses)
    (losses.sum() / 3 if output == "losses" else losses[trained.T.repeat(1, 3)].sum()).backward()
    assert seen.finish() == {}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_squared_normaliser_is_read_next_to_weights(temperature):
    torch.manual_seed(0)
    logits = (2 * torch.randn(ROWS, WIDE, VOCABULARY)).requires_grad_()
    targets, coefficient = torch.randint(0, VOCABULARY, (ROWS, WIDE)), 0.05
    seen = Outputs()
    seen.see(logits)
    scaled = logits / temperature
    likelihoods = -scaled.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    (0.5 * (likelihoods + coefficient * scaled.logsumexp(-1).square())).sum().backward()
    found = seen.finish()
    assert found["likelihoods"] == 1.0
    assert found["normaliser"] == pytest.approx(coefficient, rel=1e-3)
    assert found["bonus"] is None
    assert [dict(zip(ROW, row, strict=True))["clear"] for row in found["rows"][0]] == [WIDE] * ROWS
    assert found["rows"][0][0][ROW.index("weight")] == pytest.approx(0.5 * WIDE / temperature, rel=1e-3)


@pytest.mark.parametrize(("bonus", "wide"), [(0.0, False), (0.004, True)])
def test_slopes_of_one_temperature_are_one_and_a_term_spreads_them(bonus, wide):
    torch.manual_seed(0)
    logits = (2 * torch.randn(ROWS, WIDE, VOCABULARY)).requires_grad_()
    seen = Outputs()
    seen.see(logits)
    logprobs = (logits / 0.5).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum()
    (-(torch.randn(ROWS, WIDE) * logprobs[..., 0]).sum() - bonus * entropy).backward()
    low, high = seen.finish()["slopes"]
    assert low <= high
    assert (high - low > 0.005) == wide
