"""Measurements of the served model, beside transformers on the same weights."""
