"""Replays a trace of requests through the ops, the same steps in JAX and in PyTorch."""
