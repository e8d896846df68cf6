"""ROLL's metrics: those that it computes as they are named; the numbers are in `test_translate.py`."""

from workbench.metrics.quantities import DocumentSlots
from workbench.specs.losses import LossSpec
from workbench.systems.metrics import aliases, left_out, settings_of

TOKENS = {"actor/approxkl", "actor/policykl"}


def keys(**loss):
    return {alias.metric.key for alias in aliases("roll", settings_of(LossSpec(**loss), DocumentSlots(0, 3)))}


def test_means_of_tokens_are_those_of_token_mean():
    assert keys() == {"actor/ratio_mean", *TOKENS}
    assert keys(denominator="document") == {"actor/ratio_mean"}


def test_a_ratio_of_rows_has_no_mean_here():
    assert keys(name="gspo", denominator="token") == TOKENS


def test_shares_without_a_mask_are_left_out():
    assert "takes no mask" in left_out()["roll", "actor/ppo_ratio_clipfrac"]
