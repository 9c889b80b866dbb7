"""Why a cache did not hit: where two prompts part, what breaks the reuse of a log, and what mends it."""
