"""Tests of the command line, the embedded model, the demo and the bench."""
