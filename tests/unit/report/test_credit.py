"""The credit map: a cell for every token that counts, in the hue of its credit or of its fate."""

import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from matplotlib.colors import to_hex

from workbench.attribution import token_credit
from workbench.errors import SpecError
from workbench.report import style
from workbench.report.credit import LIKELIER, NOTHING, RARER, SILENT, credit_map, hue, shares_text
from workbench.rollouts.batch import RolloutBatch
from workbench.specs.losses import LossSpec

LETTERS = "_abcdefgh"


def batch():
    """Three documents: pushed up, and clipped in part; pushed down, with a token rejected; without advantage."""
    columns = {"old_logprobs": [-1.0] * 4, "sampler_logprobs": [-1.0] * 4}
    return RolloutBatch.from_documents(
        [
            columns | {"tokens": [1, 2, 3, 4], "loss_mask": [0, 1, 1, 1], "advantages": 1.0},
            columns
            | {
                "tokens": [1, 5, 6, 7],
                "loss_mask": [0, 0, 1, 1],
                "advantages": -0.5,
                "sampler_logprobs": [-1.0, -1.0, -1.0, -9.0],
            },
            {
                "tokens": [1, 8],
                "loss_mask": [0, 1],
                "advantages": 0.0,
                "old_logprobs": [-1.0] * 2,
                "sampler_logprobs": [-1.0] * 2,
            },
        ]
    )


POLICY_T = torch.tensor([0.0, -1.0, -0.2, -1.0, 0, 0, -1.0, -1.0, 0, -1.0])


def credits(**settings):
    icepop = LossSpec(name="grpo", correction={"kind": "icepop"}, **settings)
    return {"icepop": token_credit(batch(), icepop, POLICY_T), "plain": token_credit(batch(), LossSpec(), POLICY_T)}


def hues(axes):
    (cells,) = axes.collections
    return {
        (int(path.vertices[:, 0].min()), round(float(path.vertices[:, 1].mean() + 0.1))): to_hex(color)
        for path, color in zip(cells.get_paths(), cells.get_facecolors(), strict=True)
    }


def test_each_token_that_counts_has_a_cell_in_the_hue_of_its_credit_or_its_fate():
    figure = credit_map(batch(), credits())
    assert hues(figure.axes[0]) == {
        (1, 0): LIKELIER,
        (2, 0): SILENT["clipped"],
        (3, 0): LIKELIER,
        (2, 1): hue(0.5, 1.0),
        (3, 1): SILENT["rejected"],
        (1, 2): SILENT["zero advantage"],
    }
    assert hues(figure.axes[1])[3, 1] == hue(0.5, 1.0), "without a correction nothing is rejected"


def test_hues_run_from_likelier_to_rarer_and_small_credits_show():
    assert [hue(value, 2.0) for value in (-2.0, 2.0)] == [LIKELIER, RARER]

    def depth(value):
        return sum(abs(int(hue(value, 1.0)[i : i + 2], 16) - int(NOTHING[i : i + 2], 16)) for i in (1, 3, 5))

    assert depth(0.0) <= 6
    assert 0.4 * depth(1.0) < depth(0.25) < 0.6 * depth(1.0) < depth(0.6) < depth(1.0)


def test_all_panels_share_one_scale():
    raw = token_credit(batch(), LossSpec(denominator="raw"), POLICY_T)
    figure = credit_map(batch(), {**credits(), "raw": raw})
    assert hues(figure.axes[2])[1, 0] == LIKELIER
    assert hues(figure.axes[0])[1, 0] == hue(-1 / 6, 1.0)


def test_a_clipped_token_with_credit_of_another_term_shows_the_credit():
    pulled = replace(batch(), ref_logprobs_T=torch.full((10,), -2.0))
    credit = token_credit(pulled, LossSpec(kl={"coefficient": 0.1}), POLICY_T)
    assert hues(credit_map(pulled, {"kl": credit}).axes[0])[2, 0] == hue(
        float(credit.credit_T[2]), float(credit.credit_T.abs().max())
    )


def test_titles_have_names_and_shares():
    figure = credit_map(batch(), credits())
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "icepop\n50 % of tokens act · 17 % clipped · 17 % rejected · 17 % zero advantage",
        "plain\n67 % of tokens act · 17 % clipped · 17 % zero advantage",
    ]


def test_shares_are_never_rounded_to_nothing_or_to_all():
    many = {
        "tokens": range(2000),
        "loss_mask": [0] + [1] * 1999,
        "advantages": [1.0] * 1999 + [0.0],
        "old_logprobs": [-1.0] * 2000,
    }
    assert (
        shares_text(token_credit(RolloutBatch.from_documents([many]), LossSpec()))
        == "99.9 % of tokens act · 0.050 % zero advantage"
    )


def test_letters_are_in_cells_and_next_to_them():
    figure = credit_map(batch(), credits(), decode=LETTERS.__getitem__)
    for axes in figure.axes[:2]:
        results = {
            (text.get_position()[0] - 0.5, text.get_position()[1]): text
            for text in axes.texts
            if len(text.get_text()) == 1
        }
        assert Counter(text.get_text() for text in results.values()) == Counter("abcdaefgah")
        assert results[0, 0].get_color() == style.MUTED, "a prompt"
        assert results[2, 0].get_color() != style.MUTED
        assert len({results[place].get_color() for place in ((1, 0), (2, 0))}) == 2, "light on a deep hue"


def test_no_letters_where_a_cell_is_too_narrow():
    long = RolloutBatch.from_documents(
        [{"tokens": [1] * 200, "loss_mask": [0] + [1] * 199, "advantages": 1.0, "old_logprobs": [-1.0] * 200}]
    )
    figure = credit_map(long, {"grpo": token_credit(long, LossSpec())}, decode=LETTERS.__getitem__)
    assert not [text for text in figure.axes[0].texts if text.get_text() == "a"]
    assert len(hues(figure.axes[0])) == 199


def test_chosen_documents_are_rows_in_that_order():
    figure = credit_map(batch(), credits(), documents=[2, 0])
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["2", "0"]
    assert hues(figure.axes[0]) == {
        (1, 0): SILENT["zero advantage"],
        (1, 1): LIKELIER,
        (2, 1): SILENT["clipped"],
        (3, 1): LIKELIER,
    }
    assert "17 % rejected" in figure.axes[0].get_title(loc="left"), "shares are those of the step"


def test_the_legend_names_only_fates_that_are_there():
    def entries(found):
        return [text.get_text() for text in credit_map(batch(), found).legends[0].get_texts()]

    assert entries(credits()) == [
        "made likelier (credit down to −0.17)",
        "made less likely (up to 0.17)",
        "clipped",
        "rejected",
        "zero advantage",
    ]
    assert entries({"plain": credits()["plain"]})[2:] == ["clipped", "zero advantage"]


def test_a_step_without_any_credit_can_be_drawn():
    nothing = token_credit(batch(), LossSpec(surrogate={"coefficient": 0.0}))
    assert set(hues(credit_map(batch(), {"0": nothing}).axes[0]).values()) == {
        SILENT["no gradient"],
        SILENT["zero advantage"],
    }


def test_the_drawing_has_no_bitmap_and_is_reproducible():
    texts = [style.inline_svg(credit_map(batch(), credits(), decode=LETTERS.__getitem__), prefix="x") for _ in range(2)]
    assert texts[0] == texts[1]
    assert not re.search(r"<image|data:", texts[0]), "the page's policy forbids pictures"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"documents": [0, 3]}, r"documents \[3\] are not there"),
        ({"documents": []}, "2 credits and 0 documents"),
        ({"credits": {}}, "0 credits and 3 documents"),
        ({"batch": batch().select([0])}, "icepop, plain of another batch"),
    ],
)
def test_mismatched_shapes_are_refused(how, words):
    with pytest.raises(SpecError, match=words):
        credit_map(**({"batch": batch(), "credits": credits()} | how))
