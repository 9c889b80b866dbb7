"""Ostinato makes the repeated part of LLM prompts cheap and fast, and never wrong."""
