"""A decoding loop in C++ that needs no Python: a program of jax.export on a PJRT plugin."""
