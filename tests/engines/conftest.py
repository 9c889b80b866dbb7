from __future__ import annotations

from collections.abc import Iterator

import pytest

from engines.driver import Flips


@pytest.fixture(scope="session")
def flips() -> Iterator[Flips]:
    """Counts near ties over the session and reports them, so that none is hidden."""
    counter = Flips()
    yield counter
    if counter.count:
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.warn(f"{counter.count} answers parted at a near tie (< 1e-5)", stacklevel=1)
