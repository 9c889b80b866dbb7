"""Replays recorded requests through the real books of the cache, with no model and no tensors."""
