"""Which of several workers gets a request: the one that has its prefix, unless it has too much to do.

Books only: names of blocks and numbers of tokens. Nothing here knows of sockets, and no clock is read.
"""

from .prefixes import PrefixMap
from .ring import Ring
from .router import STRATEGIES, Ask, Choice, Router, RoutingRule, Ticket

__all__ = ["STRATEGIES", "Ask", "Choice", "PrefixMap", "Ring", "Router", "RoutingRule", "Ticket"]
