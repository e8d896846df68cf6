"""Numbers about a step that merge rightly over micro-batches and ranks."""
