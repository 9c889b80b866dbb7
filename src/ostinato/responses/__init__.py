"""Whole answers that are kept: found by everything that can change them, or by what a question means."""
