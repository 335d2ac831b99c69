"""The kernels that are generated for the test models compile: here a share of them, each for one architecture.

`make cuda-sources` compiles all of them for all architectures.
"""

from __future__ import annotations

import pytest
from cuda_sources import GRAPHS, sources
from cuda_toolchain import architectures, compile_in_turn

SHARE = 36


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPHS)
def test_the_sources_of_a_model_compile(name: str) -> None:
    if name == "efficientnet-lite0":
        pytest.importorskip("efficientnet_lite_pytorch")
    archs, found = architectures(), sources(name)
    assert found
    for turn in range(len(archs)):
        compile_in_turn((text for key, text in found.items() if int(key, 16) % (SHARE * len(archs)) == turn), turn)
