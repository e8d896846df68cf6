"""From a Hugging Face decoder to token log-probabilities."""
