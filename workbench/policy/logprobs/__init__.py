"""Hidden states to token log-probabilities: one meaning, several implementations by name."""

IMPLEMENTATIONS = ("reference", "vocabulary_parallel")
