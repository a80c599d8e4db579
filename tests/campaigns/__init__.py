"""Long random campaigns: a stated fraction with rotating seeds in every test run, the whole by `make campaign NAME`."""
