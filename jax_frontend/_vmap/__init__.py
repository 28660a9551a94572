"""``jax.vmap`` of the ops: the rule for all of them, and how each op makes one call of many."""
