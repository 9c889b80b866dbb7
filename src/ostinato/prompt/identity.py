"""Digests that name what decides a rendering."""

from __future__ import annotations

import json
from typing import Any

from blake3 import blake3


def identity_of(*parts: Any) -> str:
    """Versioned digest (``b3:…``) of JSON values; the order of an object's keys does not count."""
    canonical = json.dumps(parts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return "b3:" + blake3(canonical.encode()).hexdigest()
