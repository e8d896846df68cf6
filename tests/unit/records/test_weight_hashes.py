"""Hashes of two sides: what a tensor of the sampler is, from hashes alone."""

import json

import pytest
import torch

from workbench.errors import SpecError
from workbench.records.weight_hashes import HashLedger, by_layer, describe_layers, hash_weight, hash_weights

GENERATOR = torch.Generator().manual_seed(3)
NAMES = ("model.embed_tokens.weight", "model.layers.0.mlp.up.weight", "model.layers.10.mlp.up.weight", "lm_head.weight")
VERSIONS = [{name: torch.randn(3, 2, generator=GENERATOR) for name in NAMES} for _ in range(4)]


@pytest.fixture
def ledger():
    ledger = HashLedger()
    for number, weights in enumerate(VERSIONS):
        ledger.note(number + 5, weights)
    return ledger


@pytest.mark.parametrize(
    ("value", "how"),
    [
        (VERSIONS[3], None),
        ({n: w.double() for n, w in VERSIONS[3].items()}, None),
        (VERSIONS[2], "version 7, 1 step older"),
        (VERSIONS[1], "version 6, 2 steps older"),
        (VERSIONS[0], "version 5 (the source), 3 steps older"),
        ({n: w.bfloat16() for n, w in VERSIONS[3].items()}, "rounded to bfloat16"),
        ({n: w.half().float() for n, w in VERSIONS[3].items()}, "rounded to float16"),
        ({n: w.bfloat16() for n, w in VERSIONS[2].items()}, "version 7, 1 step older, rounded to bfloat16"),
        ({n: -w for n, w in VERSIONS[3].items()}, "other values"),
    ],
)
def test_what_a_sampler_has_in_the_place_of_a_tensor(ledger, value, how):
    sampler = json.loads(json.dumps(hash_weights({**VERSIONS[3], NAMES[2]: value[NAMES[2]]})))
    differences = ledger.differences(8, sampler)
    assert [(each.name, each.layer, each.how) for each in differences] == ([(NAMES[2], "layer 10", how)] if how else [])


def test_tensors_of_one_side_alone_are_named(ledger):
    sampler = hash_weights({**VERSIONS[3], "extra": torch.ones(1)})
    del sampler[NAMES[0]]
    assert [(each.name, each.how) for each in ledger.differences(8, sampler)] == [
        (NAMES[0], "absent in the sampler"),
        ("extra", "unknown to the trainer"),
    ]


def test_layers_are_summed_up(ledger):
    differences = ledger.differences(8, hash_weights(VERSIONS[2]))
    assert list(by_layer(differences)) == ["embed_tokens", "layer 0", "layer 10", "lm_head"]
    assert list(describe_layers(differences))[1] == "layer 0: version 7, 1 step older (1 tensors)"


def test_a_form_is_recognised_before_an_older_version(ledger):
    ledger.note(9, VERSIONS[3], {"adapter dropped": {NAMES[1]: VERSIONS[0][NAMES[1]]}})
    [difference] = ledger.differences(9, hash_weights({**VERSIONS[3], NAMES[1]: VERSIONS[0][NAMES[1]]}))
    assert difference.how == "adapter dropped"


def test_old_versions_are_forgotten_but_for_the_source():
    ledger = HashLedger(keep=2)
    for number in range(6):
        ledger.note(number, VERSIONS[0])
    assert sorted(ledger.versions) == [0, 4, 5]
    with pytest.raises(SpecError, match=r"with version 3\n  found: hashes of versions 0, 4, 5\n"):
        ledger.differences(3, {})


def test_shape_and_values_are_hashed_and_not_the_dtype():
    assert hash_weight(torch.ones(2, 3)) == hash_weight(torch.ones(2, 3, dtype=torch.bfloat16))
    assert hash_weight(torch.ones(2, 3)) != hash_weight(torch.ones(3, 2))
    assert hash_weight(torch.ones(2)) != hash_weight(torch.ones(2) + 2**-23)
    assert len(hash_weight(torch.zeros(0))) == 16
