"""Tests of the service that gateways speak, with a gateway that this project did not write."""
