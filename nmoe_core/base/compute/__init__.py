"""`map_shards`: one interface over this process, a pool of processes and a Ray cluster."""
