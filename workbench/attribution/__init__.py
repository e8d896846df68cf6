"""What part of a loss or a gradient comes from where: per-token credit."""
