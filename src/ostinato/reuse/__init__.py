"""Reuse that is not a prefix: find tokens that came back at another place, and move their KV there.

``match`` finds them, ``rope`` moves them, ``blend`` says which to compute again. Nothing here decides whether
an answer may use what was moved.
"""
