"""Possible causes of a difference between two records, by where they show.

cause.py       what a cause is, and how one is declared next to the function that judges it
observed.py    what recorders saw by themselves: settings, weights, parameters, modes
given.py       what the model was given: scores for the causes of other modules
flowed.py      what models gave and what flowed back into them: likewise
predictions.py, weights.py, objectives.py   its rules: which predictions train, what they weigh, by the objective
whole.py       whole numbers: nothing, rounding, not finite, reported wrong
factors.py     one factor of every gradient, and denominators of the loss
tokens.py      tokens and their log-probabilities
terms.py       terms of the loss
prediction.py  the loss of further tokens
mixtures.py    gates, losses of routers, experts on several ranks
slices.py      tokens, norms and layers that are cut over ranks
gradients.py   gradients of parts of the model, of a module, or over time
"""

from workbench.diagnose.causes.cause import Cause
from workbench.diagnose.causes.factors import FACTORS
from workbench.diagnose.causes.gradients import GRADIENTS
from workbench.diagnose.causes.mixtures import MIXTURES
from workbench.diagnose.causes.observed import OBSERVED
from workbench.diagnose.causes.prediction import PREDICTION
from workbench.diagnose.causes.slices import SLICES
from workbench.diagnose.causes.terms import TERMS
from workbench.diagnose.causes.tokens import TOKENS
from workbench.diagnose.causes.whole import WHOLE

CAUSES: tuple[Cause, ...] = (
    *OBSERVED,
    *WHOLE,
    *FACTORS,
    *TOKENS,
    *TERMS,
    *PREDICTION,
    *MIXTURES,
    *SLICES,
    *GRADIENTS,
)
"""All causes; of equal scores the first is ranked first."""
