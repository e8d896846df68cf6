from workbench.mismatch.configuration import Configuration
from workbench.mismatch.settings import Side


def test_what_a_side_states_is_taken_over():
    side = Side(precision="bfloat16", temperature=0.7, gemms="mxfp8")
    own = Configuration.stated(side)
    assert (own.precision, own.temperature, own.gemms, own.offset) == ("bfloat16", 0.7, "mxfp8", "none")


def test_the_head_follows_the_trunk_unless_it_is_stated():
    assert Configuration(precision="bfloat16").head_dtype == "bfloat16"
    assert Configuration(precision="bfloat16", head="float32").head_dtype == "float32"


def test_only_what_changes_the_hidden_states_changes_their_key():
    own = Configuration()
    for name, value in {"temperature": 0.5, "head": "bfloat16", "offset": "values +1", "top_k": 3}.items():
        assert own.with_changes({name: value}).trunk_key == own.trunk_key
    for name, value in {"weights": "old", "prefix": "none", "router": "float32", "tokens": "sampler_ids"}.items():
        assert own.with_changes({name: value}).trunk_key != own.trunk_key
