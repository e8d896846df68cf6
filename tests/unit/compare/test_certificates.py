"""Two runs by their certificates, hand-made: the first step, tensor and element that differ, and what is not known."""

import math

import pytest
import torch

from workbench.compare.align import Subject, compare_runs
from workbench.compare.certificates import compare_certificates
from workbench.errors import RecordError
from workbench.records.certificate import Certificate, write_certificate
from workbench.records.directory import RunDirectory
from workbench.reproducible.fingerprints import fingerprint
from workbench.specs.run import RunSpec

EXACT = {"reproducible": {"block_tokens": 8}}


def tensors(**changed):
    """What one step came to; the names are those of a certificate."""
    drawn = torch.Generator().manual_seed(0)
    made = {
        "logprobs": torch.randn(6, generator=drawn),
        "loss/total/sum": torch.tensor(0.5, dtype=torch.float64),
        "gradient/head": torch.randn(3, 2, generator=drawn),
        "gradient/embedding": torch.randn(4, generator=drawn),
        "weight/embedding": torch.randn(4, generator=drawn),
        "weight/head": torch.randn(3, 2, generator=drawn),
    }
    return made | {name.replace("__", "/"): value for name, value in changed.items()}


def ulp(name, place):
    value = tensors()[name].clone()
    value[place] = torch.nextafter(value[place], torch.tensor(9.0, dtype=value.dtype))
    return {name.replace("/", "__"): value}


def run(root, name, steps, *, kept=("gradients", "tokens"), certified=True, **settings):
    spec = RunSpec(
        steps=len(steps),
        record={
            "certificate": certified,
            "gradients": "full" if "gradients" in kept else "none",
            "tokens": "tokens" in kept,
        },
        **settings,
    )
    directory = RunDirectory.create(root, name, spec)
    directory.set_state("running")
    for number, said in enumerate(steps):
        unlike, numbers = said.pop("unlike", ()), said.pop("numbers", {})
        line = {"step": number, "loss/total/sum": float(said["loss/total/sum"]), "gradient/norm/global": 1.0} | numbers
        if "gradients" in kept:
            directory.write_tensors(
                f"step{number:04d}.gradients",
                {name.removeprefix("gradient/"): value for name, value in said.items() if name.startswith("gradient/")},
            )
        if "tokens" in kept:
            flags = {name: torch.zeros(6, dtype=torch.bool) for name in ("clipped", "would_clip", "trained")}
            directory.write_tensors(
                f"step{number:04d}.tokens",
                {"policy_logprobs": said["logprobs"], "old_logprobs": said["logprobs"], **flags},
            )
        if certified:
            certificate = Certificate(
                {name: f"{value.dtype} {fingerprint(value):016x}" for name, value in said.items()}, unlike
            )
            write_certificate(directory, number, certificate)
            line["certificate"] = certificate.hash
        directory.append_step(line)
    directory.set_state("succeeded")
    return directory


@pytest.fixture
def compared(tmp_path):
    def compare(*mine, reference=None, **settings):
        return compare_certificates(
            run(tmp_path, "mine", list(mine), **settings), run(tmp_path, "ref", reference or [tensors() for _ in mine])
        )

    return compare


class TestTheFirstThatDiffers:
    def test_nothing_does(self, compared):
        found = compared(tensors(), tensors())
        assert found.equal
        assert str(found) == (
            "mine against ref: the certificate of all 2 steps is the reference's: loss, "
            "log-probabilities, gradients and weights are the same bits"
        )

    def test_is_named_with_its_element(self, compared):
        wrong = tensors(**ulp("gradient/head", (1, 1)), **ulp("weight/head", (0, 0)), **ulp("gradient/embedding", 2))
        found = compared(tensors(), wrong)
        assert (found.step, found.differing) == (1, ("gradient/head", "gradient/embedding", "weight/head"))
        assert found.element.place == (1, 1)
        assert found.element.value == float(wrong["gradient/head"][1, 1]) != found.element.reference
        assert "step 1: certificates part at gradient/head and 2 more of 6 tensors; element [1, 1] " in found.why
        assert found.why.endswith("the first of 1 in 6")

    def test_may_be_a_log_probability_or_the_loss(self, compared):
        assert compared(tensors(**ulp("logprobs", 4))).element.place == (4,)
        found = compared(tensors(**ulp("loss/total/sum", ())))
        assert (found.element.value, found.element.reference) == (0.5000000000000001, 0.5)
        assert found.why.endswith("0.5000000000000001 against 0.5")

    def test_sign_of_zero_counts(self, compared):
        zero, minus = torch.zeros(6), torch.zeros(6)
        minus[3] = -0.0
        found = compared(tensors(logprobs=minus), reference=[tensors(logprobs=zero)])
        assert (found.element.place, str(found.element).split(",")[0]) == ((3,), "element [3] -0.0 against 0.0")

    def test_has_no_element_where_none_was_kept(self, compared):
        assert compared(tensors(**ulp("weight/head", (0, 0)))).element is None
        assert compared(tensors(**ulp("gradient/head", (0, 0))), kept=()).element is None

    def test_replicas_that_differ_are_never_equal(self, compared):
        wrong = tensors() | {"unlike": ("weight/head",)}
        found = compared(wrong, reference=[dict(wrong)])
        assert not found.equal
        assert "ranks hold different replicas of weight/head" in found.why


COUNTED = {
    "evidence/documents/sum": 4.0,
    "evidence/gradient_documents/sum": 1.0,
    "evidence/trained_tokens/sum": 6.0,
    "evidence/gradient_tokens/sum": 2.0,
}


class TestVerdicts:
    """The same bits are equal only if something was trained, and if the reference is finite."""

    def judged(self, compared, mine, reference=None):
        """The same tensors in both, with these numbers in the step records."""
        return compared(tensors() | {"numbers": mine}, reference=[tensors() | {"numbers": reference or mine}])

    def test_counts_are_stated_and_equal_is_equal(self, compared):
        found = self.judged(compared, COUNTED)
        assert (found.verdict, found.equal, found.vacuous) == ("equal", True, "")
        assert found.evidence.gradient_documents == 1
        assert found.evidence.warnings

    @pytest.mark.parametrize(
        ("numbers", "reason"),
        [
            (COUNTED | {"evidence/trained_tokens/sum": 0.0}, "no token is trained"),
            (
                COUNTED | {"evidence/gradient_documents/sum": 0.0, "evidence/gradient_tokens/sum": 0.0},
                "no document has a gradient",
            ),
            (COUNTED | {"gradient/norm/global": 0.0}, "every gradient is zero"),
            ({"gradient/norm/global": 0.0}, "every gradient is zero"),
        ],
    )
    def test_the_same_bits_of_nothing_are_vacuous(self, compared, numbers, reason):
        found = self.judged(compared, numbers)
        assert (found.verdict, found.equal) == ("vacuous", True)
        assert found.vacuous.startswith(reason)
        assert found.why.startswith(f"vacuous: {reason}")
        assert found.why.endswith("so the same certificate of the step proves nothing")

    @pytest.mark.parametrize("numbers", [{"gradient/norm/global": math.nan}, {"loss/total/sum": math.inf}])
    def test_a_reference_that_is_not_finite_is_unsound(self, compared, numbers):
        found = self.judged(compared, numbers)
        assert (found.verdict, found.equal) == ("unsound baseline", True)
        assert found.why.startswith("unsound baseline (step 0: the ")
        assert self.judged(compared, numbers, COUNTED).verdict == "equal"

    def test_other_bits_are_different_before_the_reference_diverges_and_unsound_from_there(self, tmp_path):
        fine, broken = {"numbers": COUNTED}, {"numbers": COUNTED | {"loss/total/sum": math.nan}}
        wrong = ulp("gradient/head", (0, 0))
        reference = run(tmp_path, "ref", [tensors() | fine, tensors() | broken])
        early = run(tmp_path, "early", [tensors(**wrong) | fine, tensors() | fine])
        late = run(tmp_path, "late", [tensors() | fine, tensors(**wrong) | fine])
        assert compare_certificates(early, reference).verdict == "different"
        assert compare_certificates(late, reference).verdict == "unsound baseline"

    def test_a_run_that_trained_nothing_is_vacuous_whichever_of_the_two_it_is(self, compared):
        nothing = COUNTED | {"evidence/trained_tokens/sum": 0.0, "evidence/gradient_tokens/sum": 0.0}
        assert self.judged(compared, nothing, COUNTED).verdict == "vacuous"
        assert self.judged(compared, COUNTED, nothing).verdict == "vacuous"


class TestWhatIsNotThere:
    def test_no_certificates_no_comparison(self, compared):
        assert compared(tensors(), certified=False) is None

    def test_a_hash_without_its_certificate_is_refused(self, tmp_path):
        one = run(tmp_path, "one", [tensors()])
        (one.path / "certificates" / "step0000.json").unlink()
        with pytest.raises(RecordError, match="no certificate next to its hash"):
            compare_certificates(one, one)


class TestInAnAblation:
    """Verdicts by bits: no truth, no gradients on disk."""

    @pytest.fixture
    def judged(self, tmp_path):
        def judge(mine, *, kept=(), truth="", **settings):
            subjects = [
                Subject("ref", run(tmp_path, "ref", [tensors(), tensors()], kept=kept, **settings)),
                Subject("mine", run(tmp_path, "mine", mine, kept=kept, **settings), "ref", truth),
            ]
            return compare_runs(subjects, experiment="demo", question="?")["mine"]

        return judge

    def test_the_same_bits_are_equal(self, judged):
        found = judged([tensors(), tensors()], **EXACT)
        assert (found.verdict, found.parameters) == ("equal", [])
        assert "the same bits" in found.why

    def test_one_bit_is_different(self, judged):
        found = judged([tensors(), tensors(**ulp("gradient/head", (2, 0)))], kept=("gradients", "tokens"), **EXACT)
        assert (found.verdict, found.first_step, found.first_parameter) == ("different", 1, "head")
        assert [(row.step, row.parameter) for row in found.parameters if not row.within] == [(1, "head")]
        assert "element [2, 0]" in found.why

    def test_a_weight_alone_is_different(self, judged):
        found = judged([tensors(**ulp("weight/head", (2, 0))), tensors()], **EXACT)
        assert (found.verdict, found.first_step, found.first_parameter) == ("different", 0, None)

    def test_in_the_ordinary_mode_equal_bits_need_no_truth_either(self, judged):
        assert judged([tensors(), tensors()]).verdict == "equal"
        found = judged([tensors(), tensors(**ulp("weight/head", (0, 0)))])
        assert found.verdict == "failed"
        assert "float64 truth" in found.why

    def test_in_the_ordinary_mode_budgets_decide_and_the_certificate_is_told(self, judged):
        found = judged(
            [tensors(), tensors(**ulp("weight/head", (0, 0)))], kept=("gradients", "tokens"), precision="float64"
        )
        assert found.verdict == "equal"
        assert found.why.endswith("certificates part at weight/head, alone of 6 tensors")
