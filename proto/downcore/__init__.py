"""Generated from the .proto files beside it, and committed; a test fails when they drift."""
