"""Markup: text is escaped wherever it stands, and only markup passes."""

from workbench.report.markup import Markup, breakable, join, table, tag


def test_text_is_escaped_in_content_attributes_and_tables():
    hostile = "<script>\"&'</script>"
    escaped = "&lt;script&gt;&#34;&amp;&#39;&lt;/script&gt;"
    assert tag("p", hostile, title=hostile) == f'<p title="{escaped}">{escaped}</p>'
    assert join([hostile, [hostile], None, 3]) == escaped + escaped + "3"
    assert escaped in table([hostile], [[hostile]])
    assert "<script" not in table([hostile], [[hostile]])


def test_markup_passes_and_void_elements_have_no_end():
    assert tag("p", Markup("<b>x</b>"), tag("br"), "y", hidden=True, id=None) == "<p hidden><b>x</b><br>y</p>"


def test_attribute_names_are_written_as_html_has_them():
    made = tag("i", class_="a", data_label="b", aria_hidden="true")
    assert made == '<i class="a" data-label="b" aria-hidden="true"></i>'


def test_breakable_names_break_only_after_their_separators_and_are_escaped():
    assert breakable("a.b_c<") == "a.<wbr>b_<wbr>c&lt;"


def test_a_table_heads_its_rows_and_sets_numbers_flush():
    made = table(["name", "n"], [["a", 1]], numbers=[1])
    assert '<th scope="row">a</th><td class="number">1</td>' in made
    assert '<th scope="col" class="number">n</th>' in made
