"""One file a family; the file's name is the model_type of its configuration."""
