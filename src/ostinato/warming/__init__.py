"""Fills a cache with the prompts' beginnings that a request log says will be asked for again."""
