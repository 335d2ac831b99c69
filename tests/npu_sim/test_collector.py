"""Pausing the garbage collector: it is off meanwhile, and afterwards as it was."""

import gc

import pytest

from npu_sim.collector import collector_paused


@pytest.fixture(params=[True, False], ids=["on", "off"])
def collects(request: pytest.FixtureRequest) -> bool:
    before = gc.isenabled()
    request.addfinalizer(gc.enable if before else gc.disable)
    (gc.enable if request.param else gc.disable)()
    return bool(request.param)


def test_the_collector_pauses_and_is_then_as_before(collects: bool) -> None:
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() == collects
    with pytest.raises(ZeroDivisionError), collector_paused():
        _ = 1 / 0
    assert gc.isenabled() == collects
