"""Recorders for trainers of other packages: at most five lines in a user's script.

A module needs the package that it is named after, and nothing else of the workbench but the recorder.
"""
