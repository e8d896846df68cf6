"""Two runs side by side: distances, budgets, verdicts."""
