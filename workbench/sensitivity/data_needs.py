"""Facts that faults need of the documents of a step: masks, lengths, groups, and how rows and shards have them."""

from __future__ import annotations

from workbench.faults.precision import TILE
from workbench.sensitivity.facts import RowFacts
from workbench.sensitivity.need import Need
from workbench.sharding.divisibility import multiples

SHARED_ROW = Need("every document has a row of its own", lambda f: f.any_row(lambda r: r.documents > 1))
SPLIT_DOCUMENT = Need(
    "no trained document lies on several cp ranks", lambda f: f.any_row(lambda r: r.split_documents > 0)
)
TORN_DOCUMENT = Need(
    "no document has two separate pieces on a cp rank", lambda f: f.any_row(lambda r: r.torn_documents > 0)
)
UNTRAINED = Need(
    "every document has a trained token", lambda f: f.any_step(lambda s: s.untrained > 0), "a masked document"
)
UNTRAINED_IN_GROUP = Need(
    "no masked document in a group", lambda f: f.any_step(lambda s: s.untrained_with_others > 0), "a masked document"
)
HOLES = Need("no hole in a mask", lambda f: f.any_step(lambda s: s.holes > 0), "a hole in a mask")
LOOSE_MASK = Need(
    "every mask is one run of tokens to the document's end",
    lambda f: f.any_step(lambda s: s.holes + s.open_ends > 0),
    "a hole in a mask",
)
TRAINED_END = Need("no document trains its last token", lambda f: f.any_step(lambda s: s.trained_ends > 0))
FOLLOWED_END = Need(
    "no document that trains its last token is directly before another in its row",
    lambda f: f.any_row(lambda r: r.followed_ends > 0),
)
EMPTY_SHARD = Need(
    "every row has a trained token on every rank",
    lambda f: f.any_row(lambda r: 0 in r.shard_tokens),
    "one trained document",
)
SEVERAL_DOCUMENTS = Need(
    "one trained document", lambda f: f.any_step(lambda s: sum(length > 0 for length in s.lengths) > 1)
)
VARIED_LENGTHS = Need(
    "documents of one trained length", lambda f: f.any_step(lambda s: len({*filter(None, s.lengths)}) > 1)
)
LONG = Need("documents of one trained token", lambda f: f.any_step(lambda s: max(s.lengths) > 1))


def _counted(row: RowFacts, denominator: str) -> int:
    """Number that a denominator counts in a row."""
    return {"token": row.tokens, "constant": row.documents}.get(denominator, row.trained_documents)


UNEQUAL_ROWS = Need(
    "rows with equal counts",
    lambda f: f.any_step(lambda s: len({_counted(row, f.spec.loss.denominator) for row in s.rows}) > 1),
)
UNEQUAL_SHARES = Need(
    "rows whose share of the documents is that of the tokens",
    lambda f: f.any_step(
        lambda s: any(
            row.tokens * sum(each.documents for each in s.rows) != row.documents * sum(each.tokens for each in s.rows)
            for row in s.rows
        )
    ),
)
UNEQUAL_PROMPTS = Need(
    "prompts with equal counts of trained tokens",
    lambda f: f.any_step(lambda s: len({*filter(None, s.prompt_tokens)}) > 1),
)
MIXED_UP_GROUPS = Need(
    "groups of equal size, one after another", lambda f: f.any_step(lambda s: not s.groups_in_place), "mixed-up groups"
)
PADDED_DOCUMENTS = Need(
    "no document is padded",
    lambda f: multiples(f.spec.layout).document > 1 and f.any_step(lambda s: s.padded_documents > 0),
)
SEVERAL_SAMPLES = Need(
    "every rollout is one document",
    lambda f: f.any_step(lambda s: s.rollouts_of_several > 0),
    "a rollout of two documents",
)
PADDED_VOCABULARY = Need(f"the vocabulary is a multiple of {TILE}", lambda f: f.vocabulary % TILE != 0)
OTHER_TEMPERATURE = Need("temperature 1", lambda f: f.temperature != 1.0, "temperature 0.7")
LATER_DOCUMENT = Need(
    "no trained document is behind another one in its row", lambda f: f.any_row(lambda r: r.later_documents > 0)
)
MISDEALT_ADVANTAGES = Need(
    "rows in the order of arrival, or equal advantages", lambda f: f.any_step(lambda s: s.misdealt_advantages)
)
SCALED_ADVANTAGES = Need(
    "advantages divided by a deviation",
    lambda f: f.any_step(lambda s: s.scaled_advantages > f.resolution),
    "advantages rloo",
)
REGROUPED_ADVANTAGES = Need(
    "groups by position have the same advantages", lambda f: f.any_step(lambda s: s.regrouped_advantages)
)
REACHED_ELSEWHERE = Need(
    "no gradient comes from a cp rank but the first", lambda f: f.any_row(lambda r: not r.reached <= {0})
)
TRAINED_ON_SEVERAL = Need(
    "all trained tokens are on one cp rank",
    lambda f: f.any_step(
        lambda s: sum(map(bool, map(sum, zip(*(row.shard_tokens for row in s.rows), strict=True)))) > 1
    ),
)
OWN_BASELINES = Need(
    "each row's own documents have the baseline of the step",
    lambda f: f.any_step(lambda s: s.own_baselines),
    "three micro-batches",
)
SPREAD_DOCUMENT = Need(
    "no trained document has tokens on several cp ranks", lambda f: f.any_row(lambda r: r.spread_documents > 0)
)
