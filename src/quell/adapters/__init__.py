"""What every training framework's adapter asks of a plan: which noise, which batches, which key, what was spent.

No framework is imported here: `quell.torch` and `quell.jax` decide alike because they ask the same functions.
"""
