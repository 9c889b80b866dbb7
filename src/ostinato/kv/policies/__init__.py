"""Rules of eviction beyond least recently used. Each says what it remembers, and how much of it."""
