"""The library on a machine where no package of CUDA can be imported."""

from __future__ import annotations

import subprocess
import sys

BLOCK = """
import sys

CUDA = ("cupy", "cupy_backends", "cuda", "nvidia", "numba_cuda")


class Missing:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in CUDA:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


for name in [name for name in sys.modules if name.partition(".")[0] in CUDA]:
    del sys.modules[name]
sys.meta_path.insert(0, Missing)
"""

USE = """
import numpy as np

import kvsketch
import kvsketch.adapters.transformers_cache
import kvsketch.cli
import kvsketch.validation
from kvsketch.cache import Cache
from kvsketch.codecs import GroupedInts, SignSketch

k, v = np.random.default_rng(0).standard_normal((2, 1, 2, 200, 64)).astype(np.float32)
for keys in (GroupedInts(), SignSketch(m=128, outliers=2, outlier_m=32)):
    cache = Cache(keys, GroupedInts(), residual_length=32)
    cache.append(k, v)
    cache.flush()
    cache.prepare_step()
    out = cache.step(k[:, :, :1], k[:, :, :1], v[:, :, :1])
    assert out.shape == (1, 2, 1, 64)
    assert cache.report()["engines"]["attention.attend"] == "numba_cpu"
    for device in (0, "cpu"):
        try:
            cache.to(device)
        except ModuleNotFoundError as error:
            print(device, error)
assert not {name.partition(".")[0] for name in sys.modules} & {*CUDA}
"""


def test_everything_on_the_cpu_works_and_a_device_says_what_to_install() -> None:
    ended = subprocess.run([sys.executable, "-c", BLOCK + USE], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == 2 * ["0 CUDA devices need CuPy: pip install 'kvsketch[cuda13]'"]
