"""What definitions of other systems depend on is read off a loss's settings."""

from workbench.metrics.quantities import DocumentSlots
from workbench.specs.losses import LossSpec
from workbench.systems.alias import PeerSettings, settings_of


def test_settings_are_those_of_the_loss_and_the_step():
    spec = LossSpec(name="gspo", kl={"coefficient": 0.1, "estimator": "k2"})
    found = settings_of(spec, DocumentSlots(0, 5))
    assert (found.kind, found.num_documents, found.kl_estimator, found.of_documents) == ("gspo", 5, "k2", True)
    assert found.clip.upper == 1 + spec.surrogate.clip_high
    assert found.spec is spec


def test_without_a_loss_there_is_no_clip():
    assert settings_of(None) == PeerSettings(None)
    assert settings_of(None, DocumentSlots(0, 3)).num_documents == 3


def test_a_ratio_of_tokens_is_not_one_of_documents():
    assert not settings_of(LossSpec(name="ppo")).of_documents
