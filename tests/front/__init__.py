"""Tests of the front, most of them over a real socket against a scripted engine."""
