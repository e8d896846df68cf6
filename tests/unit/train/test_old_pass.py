"""The pass of old log-probabilities: those of the stock model, and of the steps that train on the same documents."""

import torch

from tests.helpers.online_runs import online_of, spec_of
from tests.oracles import step as oracle
from workbench.policy.decoder import load_decoder
from workbench.train.old_pass import document_logprobs, with_advantages


def test_the_pass_has_the_log_probabilities_of_the_stock_model():
    spec = spec_of(online={"temperature": 0.8, "updates": 2}, data={"documents_per_step": 5})
    online = online_of(spec)
    batch = online.sample(0)[0]
    actual_S = document_logprobs(online.policy, batch, spec, online.mesh)
    model = oracle.exact(load_decoder(spec.model.source))
    start = 0
    for length in batch.lengths_N.tolist():
        document = {"tokens": batch.tokens_T[start : start + length].tolist()}
        with torch.no_grad():
            [expected] = oracle.document_logprobs(model, [document], temperature=0.8)
        for at in range(1, length):
            trained = bool(batch.loss_mask_T[start + at])
            assert abs(float(actual_S[start + at]) - (float(expected[at]) if trained else 0.0)) <= 1e-12
        start += length


def test_steps_take_advantages_as_they_are():
    spec = with_advantages(spec_of())
    assert spec.data.advantages.name == "recorded"
    assert spec_of().data.advantages.name == "rloo"
