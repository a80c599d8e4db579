"""Tests of tiers."""
