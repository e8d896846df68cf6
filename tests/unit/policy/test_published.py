"""Published sizes: as many weights as the checkpoint has, without making them."""

import torch

from workbench.policy.published import published_qwen3


def test_qwen3_has_the_weights_of_the_published_checkpoint():
    with torch.device("meta"):
        model = published_qwen3("qwen3-0.6b")
    assert sum(p.numel() for p in model.parameters()) == 596_049_920  # the head is the embedding, counted once
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.config.rope_parameters["rope_theta"] == 1e6
