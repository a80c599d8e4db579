"""What each method needs of its caller: the one table. A method that is not in it is refused to everybody."""

from collections.abc import Mapping
from enum import Enum

from daemon.front.principals import Scope

HEALTH = "grpc.health.v1.Health"
REFLECTION = "grpc.reflection.v1alpha.ServerReflection"
GENERATION = "downcore.v1.GenerationService"
CACHE = "downcore.v1.CacheService"
ADMIN = "downcore.v1.AdminService"
VLLM_ENGINE = "vllm.grpc.engine.VllmEngine"  # where the setting `gateway` is on


class Access(Enum):
    """Who may call a method."""

    OPEN = None  # anybody: it tells nothing but whether the daemon serves
    CALLER = "any"  # any principal, whatever its scopes
    GENERATE = Scope.GENERATE
    WARM = Scope.WARM
    ADMIN = Scope.ADMIN
    GATEWAY = "gateway"  # scope generate, for what a gateway asks beside its callers' requests

    @property
    def is_counted(self) -> bool:
        """It counts among its principal's open calls."""
        return self in (Access.GENERATE, Access.WARM)

    @property
    def scope(self) -> Scope | None:
        """The scope that its caller must have, if any."""
        if self is Access.GATEWAY:
            return Scope.GENERATE
        return self.value if isinstance(self.value, Scope) else None


ACCESS: Mapping[str, Mapping[str, Access]] = {
    HEALTH: {"Check": Access.OPEN, "List": Access.CALLER, "Watch": Access.CALLER},
    REFLECTION: {"ServerReflectionInfo": Access.CALLER},
    GENERATION: {"Generate": Access.GENERATE, "Tokenize": Access.GENERATE, "Abort": Access.GENERATE},
    CACHE: {
        "WarmPrefix": Access.WARM,
        "LookupPrefix": Access.WARM,
        "PinPrefix": Access.WARM,
        "UnpinPrefix": Access.WARM,
        "EvictPrefix": Access.WARM,
        "ListPrefixes": Access.WARM,
    },
    ADMIN: {
        "GetServerInfo": Access.ADMIN,
        "ListTiers": Access.ADMIN,
        "WatchTiers": Access.ADMIN,
        "ListSequences": Access.ADMIN,
        "GetLedger": Access.ADMIN,
        "AbortSequence": Access.ADMIN,
        "FlushTier": Access.ADMIN,
        "VerifyTier": Access.ADMIN,
        "SetQuota": Access.ADMIN,
        "ListQuotas": Access.ADMIN,
        "RemoveQuota": Access.ADMIN,
        "Drain": Access.ADMIN,
        "WatchEvents": Access.ADMIN,
    },
    VLLM_ENGINE: {
        "Generate": Access.GENERATE,
        "Embed": Access.GENERATE,
        "Abort": Access.GATEWAY,
        "HealthCheck": Access.GATEWAY,
        "GetModelInfo": Access.GATEWAY,
        "GetServerInfo": Access.GATEWAY,
        "GetLoads": Access.GATEWAY,
        "GetTokenizer": Access.GATEWAY,
        "SubscribeKvEvents": Access.GATEWAY,
        "FlushCache": Access.ADMIN,
        "StartProfile": Access.ADMIN,
        "StopProfile": Access.ADMIN,
    },
}


def access_of(path: str) -> Access | None:
    """What `/service/Method` needs; None: nobody may call it."""
    _, service, method = path.split("/")
    return ACCESS.get(service, {}).get(method)
