"""Settings of losses. A name selects a preset, and keys given next to it override the preset's.

The settings of each surrogate are in the module named like that of its mathematics in `workbench.losses`.
"""

from workbench.specs.losses.compat import CompatSpec as CompatSpec
from workbench.specs.losses.compat import ScalingSpec as ScalingSpec
from workbench.specs.losses.compat import with_compat as with_compat
from workbench.specs.losses.corrections import CORRECTIONS as CORRECTIONS
from workbench.specs.losses.corrections import CorrectionSpec as CorrectionSpec
from workbench.specs.losses.corrections import GateSpec as GateSpec
from workbench.specs.losses.kl import KLEstimator as KLEstimator
from workbench.specs.losses.kl import KLSpec as KLSpec
from workbench.specs.losses.loss import GROUPS as GROUPS
from workbench.specs.losses.loss import PRESETS as PRESETS
from workbench.specs.losses.loss import LossSpec as LossSpec
from workbench.specs.losses.loss import inherited_loss as inherited_loss
from workbench.specs.losses.surrogate import PARAMETERS as PARAMETERS
from workbench.specs.losses.surrogate import SURROGATES as SURROGATES
from workbench.specs.losses.surrogate import parse_surrogate as parse_surrogate
