"""Where answers rest: one protocol (:mod:`.base`), SQLite for a machine, PostgreSQL for a fleet."""
