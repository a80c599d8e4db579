"""Tests with clients that this project did not write."""
