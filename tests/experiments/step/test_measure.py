"""Choices of kernels are measured on one step, and compared with one truth; one that cannot run is named."""

from __future__ import annotations

import re

import pytest

from experiments.gpu_layouts.measure import Truth, Workload
from experiments.step import measure as step


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
