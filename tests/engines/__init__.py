"""Engines for tests: processes that speak daemon/messages.py and hold no model."""
