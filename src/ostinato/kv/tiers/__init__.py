"""Places blocks rest below the arena. Whoever is in doubt about a block says it is not there."""
