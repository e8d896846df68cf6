import pytest

from tests.helpers.bars import assert_float64_parity
from tests.oracles.step import exact, grpo_step
from workbench.errors import SpecError
from workbench.losses.build import make_loss
from workbench.policy.tiny import tiny_qwen3
from workbench.prove.arrangement import Arrangement, one_rank_policy, one_row, perform
from workbench.prove.documents import draw_documents
from workbench.prove.subject import WorkbenchSubject
from workbench.specs.run import RunSpec


def subject(**loss):
    spec = RunSpec(loss={"name": "grpo", "kl": {"coefficient": 0.07}, **loss})
    return WorkbenchSubject("grpo", spec, make_loss(spec.loss))


@pytest.fixture(scope="module")
def documents():
    return draw_documents("11", one_rank_policy())


@pytest.fixture(scope="module")
def truth(documents):
    """The paper's loss and gradients, by a stock model that knows nothing of rows and ranks."""
    told = [
        {
            "tokens": list(d.tokens),
            "loss_mask": list(d.loss_mask),
            "advantages": list(d.advantages),
            "old_logprobs": list(d.old_logprobs),
            "ref_logprobs": list(d.ref_logprobs),
        }
        for d in documents
    ]
    return grpo_step(
        exact(tiny_qwen3(19)), told, clip_low=0.2, clip_high=0.2, kl_coefficient=0.07, denominator="document"
    )[:2]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"cp": 2, "order": "zigzag"},
        {"tp": 2, "chunk_tokens": 5},
        {"chunk_tokens": 3, "fused": True},
        {"dp": 2, "multiple_of": 4, "rows": ((9, 1, 2), (3, 4), (5, 0), (8, 7, 6))},
    ],
)
def test_every_arrangement_finds_the_papers_numbers(settings, documents, truth):
    arrangement = one_row(documents, **settings) if "rows" not in settings else Arrangement(documents, **settings)
    found = perform(subject(denominator="document"), arrangement)
    assert found.error is None
    assert found.loss == pytest.approx(truth[0], rel=1e-12)
    assert_float64_parity(found.gradients, truth[1], context=str(arrangement), bar=1e-11)
    assert found.metrics["loss/policy"] + found.metrics["loss/kl"] == pytest.approx(found.loss, rel=1e-12)


def test_a_rank_without_work_is_seen(documents):
    everything = tuple(range(len(documents)))
    assert not perform(subject(), Arrangement(documents, (everything[:5], everything[5:]), dp=2)).idle
    assert perform(subject(), Arrangement(documents, (everything, ()), dp=2)).idle


def test_what_a_rank_raises_is_an_outcome(documents):
    needs_pairs = WorkbenchSubject("dpo", RunSpec(loss={"name": "dpo"}), make_loss(RunSpec(loss={"name": "dpo"}).loss))
    assert isinstance(perform(needs_pairs, one_row(documents)).error, SpecError)


def test_it_says_itself_in_a_few_words(documents):
    few = documents[:3]
    assert str(one_row(few)) == "one rank"
    assert str(Arrangement(few, ((2, 0), (1,)))) == "one rank, 2 micro-batches, documents 2 0 | 1"
    assert str(Arrangement(few, ((0, 1, 2), ()), dp=2)) == "dp=2, documents 0 1 2 | none"
    tokens = sum(len(document.tokens) for document in few)
    assert str(one_row(few, multiple_of=tokens + 1)) == f"one rank, padded to {tokens + 1} tokens"
    assert str(one_row(few, chunk_tokens=2, fused=True)) == "one rank, head 2 tokens at a time, fused"


def test_ranks_hold_weights_of_their_own_and_a_step_leaves_them_as_they_were(documents):
    first = perform(subject(), one_row(documents, cp=2))
    again = perform(subject(), one_row(documents, cp=2))
    assert first.loss == again.loss
    assert all(first.gradients[name].equal(again.gradients[name]) for name in again.gradients)
    assert not perform(subject(), one_row(documents, cp=2, multiple_of=4)).metrics.keys() ^ first.metrics.keys()
