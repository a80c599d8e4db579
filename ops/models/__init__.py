"""Models that ship with the project, each a snapshot folder with its licences in its README."""
