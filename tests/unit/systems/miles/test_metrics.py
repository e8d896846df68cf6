"""miles reports its metrics under slime's names."""

from workbench.systems.metrics import alias_table


def test_names_are_those_of_slime():
    assert list(alias_table("miles")) == list(alias_table("slime"))
