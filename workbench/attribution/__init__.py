"""Attribution of a loss and its gradient: per-token credit."""
