"""GLM-5: as DeepSeek-V3.2, with an indexer that turns neighbours, and layers that share the selection of another."""

from daemon.layers.mla import rotate_interleaved
from daemon.layers.parameters import Parameters
from daemon.models.base import BuildOptions, Model
from daemon.models.fields import Fields
from daemon.models.sparse_latent import sparse_latent_config, sparse_latent_model


def build(fields: Fields, options: BuildOptions, parameters: Parameters) -> Model:
    """Declares the model of a configuration; its parameters are filled afterwards."""
    config = sparse_latent_config(fields, options, rotate_interleaved)
    return sparse_latent_model("glm_moe_dsa", config, options, parameters)
