"""miles' loss is slime's, with bounds of log ratios."""

import numpy as np
import pytest

from tests.helpers.system_batches import differing, packed
from tests.oracles.systems import miles as oracle
from workbench.errors import SpecError
from workbench.specs.losses import LossSpec
from workbench.systems import loss_spec, replay, settings_for
from workbench.systems.translate import translation

PLAIN = {
    "eps_clip": 0.2,
    "eps_clip_high": 0.28,
    "eps_clip_c": None,
    "opsm_delta": None,
    "kl_loss_type": None,
    "kl_loss_coef": 0.0,
    "calculate_per_token_loss": False,
}


@pytest.mark.parametrize(
    "change", [{}, {"eps_clip_c": 1.5}, {"kl_loss_type": "low_var_kl", "kl_loss_coef": 0.1}], ids=str
)
@pytest.mark.parametrize("estimator", ["grpo", "gspo"])
def test_the_loss_matches_miles(estimator, change):
    config = {**PLAIN, **change}
    batch = packed(1, spread=0.4)
    function = "compute_gspo_kl" if estimator == "gspo" else "compute_policy_loss"
    result = replay("miles", "policy_loss_packed", function, config, batch)
    assert differing(result, oracle.policy_loss({**config, "advantage_estimator": estimator}, batch)) == []


def test_a_log_ratio_beyond_its_bound_has_no_gradient():
    batch = packed(1, spread=0.1)
    batch["logprobs"] = np.where(np.arange(len(batch["logprobs"])) == 0, -30.0, batch["logprobs"])
    batch["old_logprobs"] = np.where(np.arange(len(batch["logprobs"])) == 0, -1.0, batch["old_logprobs"])
    batch["mask"] = np.ones_like(batch["mask"])
    batch["advantages"] = np.ones_like(batch["advantages"])
    of_miles, of_slime = (
        replay(name, "policy_loss_packed", "compute_policy_loss", PLAIN, batch) for name in ("miles", "slime")
    )
    assert of_miles["grad_logprobs"][0] == 0
    assert of_slime["grad_logprobs"][0] != 0


@pytest.mark.parametrize(
    "settings",
    [{}, {"advantage_estimator": "gspo"}, {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl"}],
    ids=str,
)
def test_options_come_back(settings):
    spec = loss_spec("miles", settings)
    assert loss_spec("miles", settings_for("miles", spec)) == spec


def test_a_loss_that_miles_does_not_have_is_refused():
    with pytest.raises(SpecError, match="cispo"):
        settings_for("miles", LossSpec(name="cispo", surrogate={"kind": "cispo", "clip_low": 0.2, "clip_high": 0.2}))
    assert any("cut at 20" in note for note in translation("miles", {"advantage_estimator": "gspo"}).notes)
