"""The page of causes has each name that `diagnose` gives, with its sentence."""

from tests.docs.pages import ROOT
from workbench.diagnose.causes import CAUSES
from workbench.diagnose.causes.__main__ import PRODUCT, page


def test_the_saved_page_is_that_of_the_causes():
    text = page()
    assert (ROOT / "docs/reference/causes.md").read_text() == text
    single = [cause for cause in CAUSES if not PRODUCT.fullmatch(cause.name)]
    assert all(f"| `{cause.name}` | {cause.description} |" in text for cause in single)
    assert 0 < len(single) < len(CAUSES)
