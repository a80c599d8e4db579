"""The gateway's service, where the setting `gateway` asks for it: its messages come with the extra of that name.

They are not this project's, and are imported only when they are asked for.
"""

import importlib
from typing import Any

from daemon.front.sockets import ListenError

SERVICE_MODULE = "daemon.front.vllm.service"


def load() -> Any:
    """The class VllmEngine.

    Raises:
        ListenError: the extra is not installed.
    """
    try:
        return importlib.import_module(SERVICE_MODULE).VllmEngine
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("smg_grpc_proto"):
            raise
        raise ListenError("the setting gateway needs the package smg-grpc-proto: install downcore[gateway]") from None
