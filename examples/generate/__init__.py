"""Text generation with a real model: continuous batching over a paged cache, through each backend."""
