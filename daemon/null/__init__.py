"""A daemon whose engine has no model, so that what is measured of it is its front."""
