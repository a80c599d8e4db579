"""DeepSeek-V3.2: latent attention over the tokens that each layer's own indexer selects, then experts."""

from daemon.layers.parameters import Parameters
from daemon.layers.rope import rotate
from daemon.models.base import BuildOptions, Model
from daemon.models.fields import Fields
from daemon.models.sparse_latent import sparse_latent_config, sparse_latent_model


def build(fields: Fields, options: BuildOptions, parameters: Parameters) -> Model:
    """Declares the model of a configuration; its parameters are filled afterwards."""
    fields.require("indexer_types", None)
    # The indexer turns first half against second, the attention itself neighbours.
    config = sparse_latent_config(fields, options, rotate)
    return sparse_latent_model("deepseek_v32", config, options, parameters)
