"""The CPU benchmark."""
