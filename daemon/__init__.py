"""The serving processes: a front that speaks gRPC and an engine that owns the device."""
