"""Other people's models behind one address: requests are passed on, planned for, counted, and kept apart."""

from .app import create_gateway
from .upstreams import Upstream, parse_upstream, read_upstreams

__all__ = ["Upstream", "create_gateway", "parse_upstream", "read_upstreams"]
