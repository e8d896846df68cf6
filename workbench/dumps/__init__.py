"""Dumps of one optimizer step of any trainer: the type, the interchange format, shards of ranks. See README.md."""
