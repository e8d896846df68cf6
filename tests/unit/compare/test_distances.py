from workbench.compare.comparison import ParameterDifference
from workbench.compare.distances import meaning, name_factor
from workbench.specs.run import RunSpec


def rows(*ratios):
    return [
        ParameterDifference(0, f"p{i}", r, 1.0, r, abs(r - 1), 1.0, 1.0, 0.1, "gradient", False)
        for i, r in enumerate(ratios)
    ]


def test_one_factor_everywhere_gets_its_name():
    spec = RunSpec(layout={"cp": 2, "dp": 3})
    assert name_factor(rows(0.5, 0.5), spec) == (0.5, "1 / cp")
    assert name_factor(rows(3.0, 3.0), spec) == (3.0, "dp")
    assert name_factor(rows(6.0, 6.0), spec) == (6.0, "dp * cp")
    assert name_factor(rows(0.7, 0.7), spec) == (0.7, "")


def test_near_is_not_equal():
    assert name_factor(rows(0.501, 0.501), RunSpec(layout={"cp": 2})) == (0.501, "")


def test_a_parameter_too_small_to_judge_by_does_not_count():
    floored = ParameterDifference(0, "p", 7e-9, 1e-9, 7.0, 6.0, 1.0, 1.0, 0.1, "floor", False)
    assert name_factor([*rows(0.5, 0.5), floored], RunSpec(layout={"cp": 2})) == (0.5, "1 / cp")


def test_scattered_ratios_are_not_given_a_name():
    assert name_factor(rows(1.9, 2.0, 2.2), RunSpec(layout={"cp": 2})) == (2.0, "")


def test_a_gradient_that_is_gone_has_the_factor_0_without_a_name():
    assert name_factor(rows(0.0, 0.0), RunSpec(layout={"cp": 2})) == (0.0, "")
    assert name_factor(rows(0.0, 0.0, 2.0), RunSpec(layout={"cp": 2})) == (0.0, "")


def test_parameters_without_a_gradient_are_ignored():
    empty = ParameterDifference(0, "p", 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, "floor", True)
    assert name_factor([empty], RunSpec()) == (None, "")


def test_a_meaning_is_the_first_size_that_fits_or_one_over_it():
    sizes = {"dp": 3, "one": 1, "cp": 2, "also two": 2, "a * b": 6, "padded tokens / tokens": 1.25}
    assert meaning(2.0, sizes) == "cp"
    assert meaning(1 / 6, sizes) == "1 / (a * b)"
    assert meaning(1.25, sizes) == "padded tokens / tokens"
    assert meaning(0.8, sizes) == "tokens / padded tokens"
    assert meaning(1.0, sizes) == "", "a size of 1 explains nothing"
    assert meaning(0.0, sizes) == meaning(-2.0, sizes) == ""
