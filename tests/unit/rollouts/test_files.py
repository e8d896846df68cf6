"""A rollout dataset comes back bit for bit, or is refused with the name of the wrong file."""

import json
from dataclasses import fields, replace

import pytest
import torch

from workbench.errors import RecordError, ShapeError
from workbench.rollouts import files, manifest
from workbench.rollouts.batch import PADDING, Extension, RolloutBatch


def make_batch() -> RolloutBatch:
    batch = RolloutBatch.from_documents(
        [
            {
                "tokens": [5, 7, 2],
                "loss_mask": [0, 1, 1],
                "advantages": [0.0, 0.5, 0.25],
                "old_logprobs": [0, -1, -0.3],
                "sampler_logprobs": [0, -1.1, -0.2],
                "ref_logprobs": [0, -2, -0.1],
                "reward": 1.0,
                "group_id": 4,
            },
            {
                "tokens": [5, 9],
                "loss_mask": [0, 1],
                "advantages": -0.5,
                "old_logprobs": [0, -2.0],
                "sampler_logprobs": [0, -1.9],
                "ref_logprobs": [0, -1.5],
                "reward": 0.1,
                "group_id": 4,
            },
        ],
        temperature=0.7,
    )
    turns = Extension(torch.tensor([0, 0, 1, 0, 0]), "token", "turn", "Which turn wrote the token.", pad=-1, at="input")
    scale = Extension(torch.tensor([2.0, 3.0], dtype=torch.float64), "document", "factor", "Its scale.")
    return replace(batch, extensions={"turns": turns, "scale": scale}).pad_to(8)


@pytest.fixture
def folder(tmp_path):
    files.save(make_batch(), tmp_path / "recording", provenance={"made_by": "a test"})
    return tmp_path / "recording"


def test_a_batch_comes_back_bit_for_bit(folder):
    expected, actual = make_batch(), files.load(folder)
    expected_tensors = expected.token_fields() | expected.document_fields()
    actual_tensors = actual.token_fields() | actual.document_fields()
    assert set(actual_tensors) == set(expected_tensors)
    for name, value in expected_tensors.items():
        assert actual_tensors[name].dtype == value.dtype, name
        assert torch.equal(actual_tensors[name], value), name
    assert actual.temperature == 0.7
    for name, extension in expected.extensions.items():
        back = actual.extensions[name]
        assert (back.level, back.unit, back.meaning, back.pad, back.at) == (
            extension.level,
            extension.unit,
            extension.meaning,
            extension.pad,
            extension.at,
        )


def test_fields_that_are_absent_stay_absent(tmp_path):
    files.save(
        RolloutBatch.from_documents(
            [{"tokens": [1, 2], "loss_mask": [0, 1], "advantages": 1.0, "old_logprobs": [0, -1]}]
        ),
        tmp_path,
    )
    batch = files.load(tmp_path)
    assert batch.sampler_logprobs_T is None
    assert batch.rewards_N is None


def test_the_manifest_describes_every_tensor(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["version"] == 1
    assert manifest["temperature"] == 0.7
    assert manifest["counts"] == {"documents": 2, "tokens": 8, "trained_tokens": 3}
    assert manifest["provenance"] == {"made_by": "a test"}
    assert manifest["tensors"]["bytes"] == (folder / "rollouts.safetensors").stat().st_size
    old = manifest["fields"]["old_logprobs_T"]
    assert (old["unit"], old["dtype"], old["shape"], old["level"]) == ("nats", "float32", [8], "token")
    assert manifest["fields"]["turns"]["extension"] is True
    assert manifest["fields"]["turns"]["meaning"] == "Which turn wrote the token."


def test_every_field_has_a_meaning():
    assert set(files.MEANINGS) == {f.name for f in fields(RolloutBatch) if "level" in f.metadata}


def test_a_truncated_rollout_dataset_is_refused_by_name(folder):
    path = folder / "rollouts.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-7])
    with pytest.raises(RecordError) as caught:
        files.load(folder)
    assert str(path) in str(caught.value)
    expected = f"truncated: {len(content) - 7} bytes, where manifest.json says {len(content)}"
    assert expected in str(caught.value)


def test_one_changed_bit_is_refused_by_name(folder):
    path = folder / "rollouts.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(RecordError, match=r"rollouts\.safetensors\n  found: sha256 .* where manifest\.json"):
        files.load(folder)


def test_appended_bytes_are_refused(folder):
    with (folder / "rollouts.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(RecordError, match=r"rollouts\.safetensors\n  found: \d+ bytes, where"):
        files.load(folder)


@pytest.mark.parametrize("name", ["rollouts.safetensors", "manifest.json"])
def test_missing_file_is_refused_by_name(folder, name):
    (folder / name).unlink()
    with pytest.raises(RecordError, match=f"rollout dataset file {folder / name}"):
        files.load(folder)


def test_a_missing_folder_is_reported(tmp_path):
    with pytest.raises(RecordError, match="no such folder"):
        files.load(tmp_path / "nowhere")


def change_manifest(folder, change):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.update(version=2), "version = 2: Input should be 1"),
        (lambda m: m.update(format="other"), "format = 'other': Input should be 'workbench rollouts'"),
        (lambda m: m.pop("temperature"), "temperature: Field required"),
        (lambda m: m.update(surprise=1), "unknown key 'surprise' .known here: counts, fields, format, "),
        (lambda m: m["counts"].update(tokens=9), "tokens=9.* holds documents=2 tokens=8"),
        (lambda m: m["fields"].pop("rewards_N"), "rewards_N.* where manifest.json says"),
        (lambda m: m["fields"]["rewards_N"].update(dtype="float64"), r"rewards_N is float32\[2\].* says float64\[2\]"),
        (lambda m: m["fields"]["tokens_T"].update(shape=[3]), r"tokens_T is int64\[8\].* says int64\[3\]"),
        (lambda m: m["fields"]["turns"].update(extension=False), "fields .'turns'., which no batch has"),
        (lambda m: m.update(temperature=-1.0), "temperature is -1.0"),
        (lambda m: m.update(temperature=float("nan")), "temperature is nan"),
    ],
)
def test_manifest_that_does_not_fit_is_refused(folder, change, words):
    change_manifest(folder, change)
    with pytest.raises(RecordError, match=words):
        files.load(folder)


def test_manifest_that_is_not_json_is_refused_by_name(folder):
    (folder / "manifest.json").write_text('{"format": ')
    with pytest.raises(RecordError, match=r"manifest\.json\n  found: JSONDecodeError"):
        files.load(folder)


def test_pickle_is_never_loaded(folder):
    """Even with a checksum that fits, a file that torch.load would execute is only no safetensors."""
    import hashlib
    import io

    buffer = io.BytesIO()
    torch.save({"tokens_T": torch.zeros(3)}, buffer)
    (folder / "rollouts.safetensors").write_bytes(buffer.getvalue())
    change_manifest(
        folder,
        lambda m: m["tensors"].update(
            bytes=len(buffer.getvalue()), sha256=hashlib.sha256(buffer.getvalue()).hexdigest()
        ),
    )
    with pytest.raises(RecordError, match="not safetensors"):
        files.load(folder)


def test_a_rollout_dataset_is_not_overwritten_by_accident(folder):
    before = (folder / "manifest.json").read_bytes()
    with pytest.raises(RecordError, match="not overwritten by accident"):
        files.save(make_batch(), folder)
    assert (folder / "manifest.json").read_bytes() == before
    files.save(make_batch().select([0]), folder, overwrite=True)
    assert files.load(folder).num_documents == 1


def test_a_killed_writer_leaves_no_partial_rollout_dataset(folder, monkeypatch):
    real = manifest.write_whole

    def dies_before_the_manifest(path, content):
        if path.name == "manifest.json":
            raise KeyboardInterrupt
        real(path, content)

    monkeypatch.setattr(manifest, "write_whole", dies_before_the_manifest)
    with pytest.raises(KeyboardInterrupt):
        files.save(make_batch().select([0]), folder, overwrite=True)
    with pytest.raises(RecordError, match=r"manifest\.json\n  found: no such file"):
        files.load(folder)


def test_no_temporary_file_stays(folder):
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "rollouts.safetensors"]


def test_a_saved_subset_is_its_own_source(tmp_path):
    subset = make_batch().select([1]).pad_to(4)
    assert subset.source_T.tolist() == [3, 4, PADDING, PADDING]
    files.save(subset, tmp_path)
    batch = files.load(tmp_path)
    assert batch.source_T.tolist() == [0, 1, PADDING, PADDING]
    assert batch.tokens_T.tolist() == [5, 9, 0, 0]
    assert batch.extensions["turns"].values.tolist() == [0, 0, -1, -1]


def test_float64_values_come_back_in_float64(tmp_path):
    old = torch.tensor([0.0, -0.123456789012345], dtype=torch.float64)
    files.save(
        RolloutBatch.from_documents([{"tokens": [1, 2], "loss_mask": [0, 1], "advantages": 1.0, "old_logprobs": old}]),
        tmp_path,
    )
    batch = files.load(tmp_path)
    assert batch.old_logprobs_T.dtype == torch.float64
    assert batch.old_logprobs_T.tolist() == [0.0, -0.123456789012345]
    assert batch.advantages_T.dtype == torch.float32


def test_provenance_outside_of_json_is_refused(tmp_path):
    with pytest.raises(ShapeError, match="provenance"):
        files.save(make_batch(), tmp_path, provenance={"rate": float("nan")})
    assert list(tmp_path.iterdir()) == []
