"""Advantages: the reward of a completion, or of a token, relative to a baseline.

`groups` compares completions of the same prompt, `tokens` computes advantages per token, `baselines` compares the
reward-to-go of a token with a baseline at that token, `inputs` has what an estimator reads, and `registry` every
estimator under the name that a spec uses. Advantages are data: computed once on all documents of a step, in float64,
before anything is packed or split.
"""
