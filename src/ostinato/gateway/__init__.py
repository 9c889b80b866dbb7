"""Other people's models behind one address: requests are passed on, planned for, counted, and kept apart."""

from .app import create_gateway
from .fleet import FleetOptions
from .upstreams import Upstream, parse_upstream, read_upstreams
from .workers import Fleet

__all__ = ["Fleet", "FleetOptions", "Upstream", "create_gateway", "parse_upstream", "read_upstreams"]
