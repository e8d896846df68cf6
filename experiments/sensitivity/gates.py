"""Tolerances of public checks, each with the file and commit that it was read in.

A gate is applied to the numbers of one configuration with and without a fault. So it is lenient to the gates in two
ways: without a fault there is no difference at all, and a gate that compares two layouts has to allow one.
"""

from __future__ import annotations

from workbench.sensitivity.gates import Gate, Tolerance

GATES = (
    Gate(
        name="miles, CI of parallel layouts",
        gradient_norm=Tolerance(0.03, 0.03, relative_to="larger", joined="maximum"),
        source="radixark/miles 31f1ca96, miles/backends/training_utils/ci_utils.py, check_grad_norm: "
        "math.isclose(rel_tol=0.03, abs_tol=0.03)",
    ),
    Gate(
        name="slime, CI of parallel layouts",
        gradient_norm=Tolerance(0.01, 0.01, relative_to="larger", joined="maximum"),
        source="THUDM/slime 624b824a, slime/backends/megatron_utils/model.py, --ci-load-grad-norm: "
        "math.isclose(rel_tol=0.01, abs_tol=0.01)",
    ),
    Gate(
        name="verl, SFT engines",
        loss=Tolerance(1e-2, 1e-2, relative_to="other"),
        gradient_norm=Tolerance(3e-2, 1e-4, relative_to="other"),
        steps=1,
        source="verl-project/verl 1dda039b, tests/special_e2e/sft/compare_sft_engine_results.py, compare_results: loss "
        "atol=1e-2, rtol=1e-2, gradient norm atol=1e-4, rtol=3e-2, of the first step",
    ),
    Gate(
        name="NeMo-RL, number of micro-batches",
        loss=Tolerance(1e-5, 1e-5, relative_to="other"),
        gradient_norm=Tolerance(1e-5, 1e-5, relative_to="other"),
        steps=1,
        source="NVIDIA-NeMo/RL 7ea279ab, tests/unit/models/policy/test_megatron_worker.py, lines 1532, 1533 and 1623: "
        "loss and gradient norm rtol=1e-5, atol=1e-5",
    ),
    Gate(
        name="Automodel, resumed trajectory",
        loss=Tolerance(2e-3, 5e-3, relative_to="larger"),
        first_loss=Tolerance(2e-3, 1e-5, relative_to="larger"),
        source="NVIDIA-NeMo/Automodel 36044ad3, tests/functional_tests/checkpoint_robustness/resume_trajectory.py, "
        "profile standard: loss atol=1e-5, rtol=2e-3 in the first step, atol=5e-3, rtol=2e-3 later",
    ),
    Gate(
        name="torchtitan, loss compare",
        loss=Tolerance(),
        source="pytorch/torchtitan b5bcd76c, scripts/loss_compare.py, --assert-equal: losses of every step are equal",
    ),
)
"""Gates of other projects. torchtitan's loss is read from TensorBoard, in float32: here equality is in float64, which
is stricter."""
