"""Choices of kernels are measured on one step, and compared with one truth; one that cannot run is named."""

from __future__ import annotations

import json
import re

import pytest

from experiments.gpu_layouts.measure import Truth, Workload
from experiments.step import measure as step
from workbench.atomic import from_json
from workbench.rollouts.batch import RolloutBatch


@pytest.fixture(scope="module")
def record():
    workload = Workload(
        precision="float32",
        rows=1,
        row_tokens=256,
        document_tokens=(32, 128),
        truth=Truth(precision="float64", row_tokens=256),
    )
    choices = {"one_rank": {"kernel": "plain"}, "cudnn": {"kernel": "cudnn"}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "CHOICES", choices)
        return step.measure(workload, samples=1)


def test_a_choice_is_timed_and_compared(record):
    entry = record["choices"]["one_rank"]
    assert entry["step_ms"] == entry["samples_ms"][0] > 0
    assert 0 < entry["parity"]["distance"] < 1e-4
    assert entry["parity"]["distance_in_one_ranks"] == 1


def test_a_choice_that_cannot_run_is_left_out_with_its_reason(record):
    assert "cudnn" in record["choices"]["cudnn"]["left_out"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("nvjet_sm90_tst_128x248_64x4_2x1_v_bz_coopA_NNT", "gemm"),
        ("_rms_norm_backward_kernel", "compiled or Triton"),
        ("void at::native::multi_tensor_apply_kernel", "optimizer"),
        ("void at::native::reduce_kernel<128, 4>", None),
    ],
)
def test_kernels_are_classed_by_their_names(name, kind):
    assert next((kind for kind, names in step.CLASSES if re.search(names, name)), None) == kind


def test_a_record_is_complete_after_every_choice(record, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "CHOICES", {"one_rank": {"kernel": "plain"}})
        patch.setattr(step, "PEERS", {"peer": {"attention": "flash", "liger": True}})
        workload = Workload(**record["plan"]["workloads"]["step"])
        step.measure(workload, samples=1, record=tmp_path / "record.json")
    saved = from_json((tmp_path / "record.json").read_text())
    assert saved["choices"]["one_rank"]["parity"]["distance_in_one_ranks"] == 1
    assert "left_out" in saved["peers"]["peer"]  # its kernels need a GPU


def test_gaps_between_kernels_that_overlap():
    kernels = [(0.0, 1000.0, "a"), (3000.0, 4000.0, "c"), (500.0, 2000.0, "b"), (6000.0, 7000.0, "c")]
    found = step.gaps(kernels)
    assert found["total_ms"] == 3.0
    assert [(gap["after"], gap["before"], gap["total_ms"]) for gap in found["longest"]] == [
        ("c", "c", 2.0),
        ("b", "c", 1.0),
    ]


def test_model_flop_is_that_of_two_per_weight_and_four_per_visible_pair(tmp_path):
    sizes = {"hidden_size": 2, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"head_dim": 4, "intermediate_size": 5, "vocab_size": 7}))
    documents = [{"tokens": [1, 2, 3], "loss_mask": [0, 1, 1]}, {"tokens": [1, 2], "loss_mask": [0, 1]}]
    more = {"advantages": 1.0}
    batch = RolloutBatch.from_documents([d | more | {"old_logprobs": [0.0] * len(d["tokens"])} for d in documents])
    projections, mlp = 2 * 2 * 4 + 2 * 2 * 4 + 2 * (2 * 1 * 4), 3 * 2 * 5
    pairs = 6 + 3
    forward = 3 * (2 * (projections + mlp) * 5 + 4 * pairs * 4 * 2) + 2 * 2 * 7 * 3
    assert step.model_flop(batch, tmp_path / "config.json") == 3 * forward
