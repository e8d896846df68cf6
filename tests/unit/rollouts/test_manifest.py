"""The manifest tells the sizes and the units of a dataset without a tensor."""

import pytest

from tests.unit.rollouts.test_importers import expected_batch
from workbench.errors import RecordError
from workbench.rollouts.manifest import read_manifest, refuse_existing, save


def test_what_was_written_is_read_without_the_tensors(tmp_path):
    written = save(expected_batch(), tmp_path, provenance={"by": "me"})
    (tmp_path / "rollouts.safetensors").unlink()
    read = read_manifest(tmp_path)
    assert read == written
    assert (read.counts.documents, read.counts.tokens, read.counts.trained_tokens) == (2, 8, 4)
    assert read.fields["old_logprobs_T"].unit == "nats"
    with pytest.raises(RecordError, match="not overwritten by accident"):
        refuse_existing(tmp_path)
