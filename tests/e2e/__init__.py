"""The whole daemon over a real socket."""
