"""One rule for ranks and launchers: what must divide what. Their messages are tested where ranks apply them."""

import pytest

from workbench.errors import ShardingError, SpecError
from workbench.sharding import divisibility
from workbench.sharding.orders import ORDERS
from workbench.specs.groups import DataSpec, LayoutSpec, ReproducibleSpec


def test_every_order_has_a_multiple():
    assert list(divisibility.ROW_MULTIPLES) == list(ORDERS)


@pytest.mark.parametrize(
    ("check", "arguments", "words"),
    [
        (divisibility.check_heads, ({"query": 4, "key/value": 2}, 4), "2 key/value heads"),
        (divisibility.check_dealt_heads, (4, 2, 3, "cp"), "4 query heads and 2 key/value heads on a rank"),
        (divisibility.check_features, ("mlp", 192, 5), "192 features"),
        (divisibility.check_experts, ("mlp", 8, 3), "8 experts in mlp"),
        (divisibility.check_experts, ("mlp", 0, 2), "no mixture of experts"),
        (divisibility.check_pieces, ("vocabulary", 19, 9), "pieces of 3 leave a rank empty"),
        (divisibility.check_weight_chunks, (8, {"query heads": 4}, 19, 1), "4 query heads"),
        (divisibility.check_documents_per_step, (73, 72, "data"), "72 documents in data"),
        (divisibility.check_documents_over_dp, (72, 100), "28 are empty in every step, all those of dp rank 99"),
        (divisibility.check_documents_over_dp, (4, 2, 4), "4 are empty"),
    ],
)
def test_what_does_not_divide_is_refused(check, arguments, words):
    with pytest.raises((ShardingError, SpecError), match=words):
        check(*arguments)


@pytest.mark.parametrize(
    ("check", "arguments"),
    [
        (divisibility.check_heads, ({"query": 4, "key/value": 2}, 2)),
        (divisibility.check_features, ("mlp", 192, 4)),
        (divisibility.check_experts, ("mlp", 8, 4)),
        (divisibility.check_weight_chunks, (2, {"query heads": 4}, 19, 2)),
        (divisibility.check_documents_per_step, (72, 72, "data")),
        (divisibility.check_documents_per_step, (None, 1, "data")),
        (divisibility.check_documents_over_dp, (2, 2)),
        (divisibility.check_documents_over_dp, (5, 2, 4)),
    ],
)
def test_what_divides_passes(check, arguments):
    assert check(*arguments) is None


def test_sizes_that_a_caller_needs():
    assert divisibility.check_dealt_heads(4, 2, 4, "cp") == 2
    assert divisibility.check_pieces("vocabulary", 19, 4) == 5


class TestRows:
    LAYOUT = LayoutSpec(cp=2, order="zigzag")

    def test_the_multiple_of_the_layout_or_a_given_one(self):
        assert divisibility.check_row_multiple(DataSpec(), self.LAYOUT, ReproducibleSpec()) == 4
        assert divisibility.check_row_multiple(DataSpec(multiple_of=12), self.LAYOUT, ReproducibleSpec()) == 12

    @pytest.mark.parametrize(
        ("data", "blocks"), [({"multiple_of": 6}, None), ({"micro_batch_tokens": 100}, 8), ({"multiple_of": 4}, 8)]
    )
    def test_rows_that_cannot_be_split_are_refused(self, data, blocks):
        with pytest.raises(SpecError, match="rows of this layout are multiples of"):
            divisibility.check_row_multiple(DataSpec(**data), self.LAYOUT, ReproducibleSpec(block_tokens=blocks))
