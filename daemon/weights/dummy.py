"""Seeded weights for any configuration, without files: to size, time and test a model without its checkpoint."""

import hashlib
import math

import torch

from daemon.layers.parameters import Parameters
from daemon.weights.reader import Progress


def fill_with_dummies(parameters: Parameters, seed: int, progress: Progress) -> bytes:
    """Fills all parameters from the seed and their names; returns a 32-byte digest of what they were made from.

    Matrices are scaled by their inputs, so that activations keep their size through any depth; vectors are near one,
    and biases near zero. They are made where they stay: an accelerator fills many gigabytes in seconds, with other
    values than a CPU, as the digest says.
    """
    device = parameters.device
    where = "" if device.type == "cpu" else f", {device.type}"
    digest = hashlib.blake2b(f"dummy weights, seed {seed}{where}".encode(), digest_size=32)
    generator = torch.Generator(device if device.type == "cuda" else "cpu")
    total = sum(target.view.nbytes for target in parameters.targets.values())
    done = 0
    progress(0, total)
    for name, target in sorted(parameters.targets.items()):
        digest.update(repr((name, target.shape, str(target.view.dtype))).encode())
        name_seed = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        generator.manual_seed(int.from_bytes(name_seed, "little") >> 1)
        if target.view.dtype.is_floating_point:
            target.view.copy_(_values(name, target.shape, generator).view(target.view.shape))
        else:
            target.view.zero_()
        done += target.view.nbytes
        progress(done, total)
    return digest.digest()


def _values(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(shape, generator=generator, device=generator.device)
    if len(shape) > 1:
        return values.mul_(1 / math.sqrt(max(1, shape[-1])))
    return values.mul_(0.02) if name.endswith("bias") else values.mul_(0.1).add_(1)
