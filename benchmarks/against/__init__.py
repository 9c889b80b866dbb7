"""What `peers.py` is made of: workloads, one client for all, environments, servers."""
