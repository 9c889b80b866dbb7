"""The vendors' prompt caches: their rules as data, what a request costs under them, where breakpoints pay.

Nothing here reads a clock, the network or the environment. Times (seconds) and dates come in by argument.
"""
