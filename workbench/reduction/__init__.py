"""From per-token values to one number: weights of the whole step, partial sums that know they are partial."""
