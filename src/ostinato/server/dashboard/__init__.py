"""The dashboard: pages about what the cache does, beside the API that does it."""

from .app import Dashboard

__all__ = ["Dashboard"]
