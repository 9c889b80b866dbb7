"""The names of the eviction policies, for whoever must not load numpy to list them."""

POLICY_NAMES = (
    "lru",
    "fifo",
    "lfu",
    "lru-2",
    "ttl",
    "size-ttl",
    "s3-fifo",
    "arc",
    "lirs",
    "cost",
    "workload",
)
