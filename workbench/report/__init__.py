"""Figures, the report page, and the same in a notebook.

    figures   functions that take a comparison and return a matplotlib figure
    page      `write_report`: the whole comparison as one HTML file that needs nothing else
    summary   `show`: the verdicts in a notebook

matplotlib and IPython are imported in this layer only.
"""
