"""A step written as the guide writes it is read whole; each mistake of a writer is named."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from workbench.dumps.interchange import read_step
from workbench.errors import RecordError, SpecError

GUIDE = Path(__file__).parents[3] / "docs/guides/check-a-step.md"
MASK = torch.tensor([[1, 1, 0], [0, 1, 1]])
TENSORS = {
    "loss_mask": MASK,
    "old_logprobs": torch.tensor([[-1.0, -2.0, 0.0], [-0.5, -0.25, -3.0]]),
    "advantages": torch.tensor([1.0, -1.0]),
    "group_ids": torch.tensor([4, 4]),
}


def the_writer():
    """The function that the guide shows, and its lines."""
    (code,) = re.findall(r"```python\n(import json.*?)```", GUIDE.read_text(), re.DOTALL)
    names = {}
    exec(code, names)
    return names["write_step"], [line for line in code.splitlines() if line.strip()]


def test_the_writer_of_the_guide_fits_in_20_lines_and_is_read(tmp_path):
    write_step, lines = the_writer()
    assert len(lines) <= 20
    write_step(tmp_path / "step", TENSORS, settings={"name": "grpo"}, losses={"total": 0.5}, on_policy=True)
    dump = read_step(tmp_path / "step")
    assert dump.loss_mask_T.tolist() == [True, True, False, False, True, True]
    assert dump.tokens["old_logprobs"].tolist() == [-1, -2, 0, -0.5, -0.25, -3]
    assert dump.advantages_T.tolist() == [1, 1, 1, -1, -1, -1]
    assert dump.documents["group_ids"].tolist() == [4, 4]
    assert (dump.settings, dump.losses, dump.on_policy) == ({"name": "grpo"}, {"total": 0.5}, True)


def write(folder, tensors_of, **about):
    folder.mkdir(exist_ok=True)
    for name, tensors in tensors_of.items():
        save_file(tensors, folder / name)
    about = {"format": "rl step", "version": 1, "files": list(tensors_of), **about}
    (folder / "step.json").write_text(json.dumps(about))
    return folder


def test_rows_of_ranks_and_packed_tokens_are_the_same_step(tmp_path):
    whole = read_step(write(tmp_path / "whole", {"a.safetensors": TENSORS}))
    rows = {f"{r}.safetensors": {n: t[r : r + 1] for n, t in TENSORS.items()} for r in (1, 0)}
    for number, tensors in rows.items():
        tensors["document_numbers"] = torch.tensor([int(number[0])])
    ids = torch.tensor([0, 0, 0, 1, 1, 1])
    flat = {name: value.reshape(-1) if value.dim() == 2 else value for name, value in TENSORS.items()}
    packed = {"a.safetensors": {**flat, "document_ids": ids}}
    of_tokens = {}
    for rank, index in enumerate(([0, 3, 5], [1, 2, 4])):  # as context-parallel ranks hold them
        of_tokens[f"{rank}.safetensors"] = {
            **{name: value[index] for name, value in flat.items() if len(value) == 6},
            **{name: value for name, value in flat.items() if len(value) == 2},
            "document_ids": ids[index],
            "positions": torch.tensor([0, 1, 2, 0, 1, 2])[index],
            "document_numbers": torch.tensor([0, 1]),
        }
    for number, files in enumerate((rows, packed, of_tokens)):
        dump = read_step(write(tmp_path / str(number), files))
        assert torch.equal(dump.document_ids_T, whole.document_ids_T)
        for level in ("tokens", "documents"):
            for name, value in getattr(whole, level).items():
                assert torch.equal(getattr(dump, level)[name], value), (number, name)


def test_an_overlap_of_ranks_is_refused(tmp_path):
    files = {f"{rank}.safetensors": {**TENSORS, "document_numbers": torch.tensor([0, 1])} for rank in (0, 1)}
    with pytest.raises(RecordError, match="6 tokens twice, first document 0, token 0"):
        read_step(write(tmp_path / "step", files))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"old_logprob": torch.zeros(2, 3)}, "old_logprob: did you mean 'old_logprobs'"),
        ({"loss_mask": torch.ones(2)}, r"loss_mask: \[2\], where it is \[B, C\]"),
        ({"loss_mask": torch.full((2, 3), 2)}, "loss_mask: dtype torch.int64, where a mask is bool"),
        ({"old_logprobs": torch.zeros(2, 4)}, r"old_logprobs: \[2, 4\], where loss_mask is \[2, 3\]"),
        ({"rewards": torch.ones(3)}, "rewards of 3 documents"),
        ({"positions": torch.arange(3)}, "positions without document_ids"),
        ({"document_numbers": torch.arange(3)}, "document_numbers: 3, of 2 rows"),
    ],
)
def test_each_mistake_in_tensors_is_named(tmp_path, tensors, message):
    with pytest.raises(RecordError, match=message):
        read_step(write(tmp_path / "step", {"a.safetensors": {**TENSORS, **tensors}}))


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"version": 2}, "version"),
        ({"format": "other"}, "format"),
        ({"setings": {}}, "setings"),
        ({"layout": {"dp": 0}}, "dp"),
        ({"files": ["../a.safetensors"]}, "without a path"),
        ({"losses": {"total": float("nan")}}, "total = nan"),
        ({"files": ["b.safetensors"]}, "No such file"),
    ],
)
def test_each_mistake_in_the_json_is_named(tmp_path, about, message):
    with pytest.raises(RecordError, match=message):
        read_step(write(tmp_path / "step", {"a.safetensors": TENSORS}, **about))


def test_damage_is_an_error(tmp_path):
    folder = write(tmp_path / "step", {"a.safetensors": TENSORS})
    whole = (folder / "a.safetensors").read_bytes()
    for content in (b"", whole[:40], whole[:-4], b"\xff" * 60):
        (folder / "a.safetensors").write_bytes(content)
        with pytest.raises(RecordError, match="not safetensors"):
            read_step(folder)
    for content in ("", "{", "[]", "[" * 100_000):
        (folder / "step.json").write_text(content)
        with pytest.raises(RecordError, match=r"step\.json"):
            read_step(folder)
    with pytest.raises(SpecError):
        read_step(3)


def test_prompts_engine_ids_and_gradients_are_read(tmp_path):
    writer, _ = the_writer()

    def write_step(folder, *arguments, **about):
        shutil.rmtree(folder, ignore_errors=True)
        writer(folder, *arguments, **about)
        save_file({"w": torch.ones(2, 2)}, folder / "g.safetensors")

    tmp_path = tmp_path / "step"
    mask = torch.ones(2, 2)
    ids = {
        "prompt_ids": torch.tensor([5, 6, 7]),
        "prompt_lengths": torch.tensor([1, 2]),
        "sampler_ids": torch.tensor([1, 2]),
        "sampler_lengths": torch.tensor([2, 0]),
    }
    about = {"gradients": ["g.safetensors"], "gradient_norm": 2.0, "texts": ["a", "b"]}
    write_step(tmp_path, {"loss_mask": mask, **ids}, **about)
    step = read_step(tmp_path)
    assert [one.tolist() for one in step.ids["prompt_ids"]] == [[5], [6, 7]]
    assert [one.tolist() for one in step.ids["sampler_ids"]] == [[1, 2], []]
    assert (step.gradient_norm, step.texts) == (2.0, ("a", "b"))
    assert step.gradients["w"].tolist() == [[1, 1], [1, 1]]
    for wrong, text in (
        ({"prompt_lengths": torch.tensor([1, 1])}, "prompt_lengths: 2 documents of 2, 2 tokens of 3"),
        ({"prompt_lengths": torch.tensor([3])}, "prompt_lengths: 1 documents of 2"),
        ({"prompt_ids": torch.ones(3)}, "prompt_ids: torch.float32"),
    ):
        write_step(tmp_path, {"loss_mask": mask, **ids, **wrong}, **about)
        with pytest.raises(RecordError, match=text):
            read_step(tmp_path)
    write_step(tmp_path, {"loss_mask": mask, "prompt_ids": ids["prompt_ids"]})
    with pytest.raises(RecordError, match="prompt_ids without prompt_lengths"):
        read_step(tmp_path)
    write_step(tmp_path, {"loss_mask": mask, "prompt_lengths": ids["prompt_lengths"]})
    with pytest.raises(RecordError, match="prompt_lengths without prompt_ids"):
        read_step(tmp_path)
    write_step(tmp_path, {"loss_mask": mask}, gradients=["nowhere.safetensors"])
    with pytest.raises(RecordError, match=r"nowhere\.safetensors"):
        read_step(tmp_path)
