"""A process that forks while other threads are in calls: the child runs the modules, or says why it does not."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")

HARNESS = """
    import os, signal, threading, time
    import numpy as np, torch
    from torch import nn
    import npu_sim
    from npu_compiler import DeviceError

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 64))

        def forward(self, x):
            return self.layers(x)

    def outcome(check, seconds=30):
        '''The exit status of a child that runs a function; a string where it hangs.'''
        child = os.fork()
        if not child:
            try:
                status = 0 if check() else 3
            except BaseException as error:
                print(type(error).__name__, error, flush=True)
                status = 4
            os._exit(status)
        for _ in range(100 * seconds):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return "hangs"

    def in_threads(call, count=2):
        over = threading.Event()
        def work():
            while not over.is_set():
                call()
        threads = [threading.Thread(target=work) for _ in range(count)]
        for thread in threads:
            thread.start()
        return over, threads

    module = Net().eval()
    x, y = torch.randn(64, 256), torch.randn(64, 256)
"""


def run(script: str) -> str:
    """Run a script in a process of its own; return what it prints."""
    source = textwrap.dedent(HARNESS) + textwrap.dedent(script)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_a_child_that_was_forked_during_calls_runs_the_module(tmp_path: object) -> None:
    printed = run(
        f"""
        with torch.no_grad():
            wanted = module(y)
            compiled = npu_sim.compile(module, (x,))
        compiled.save({str(tmp_path)!r} + "/net.npumod")
        loaded = npu_sim.load({str(tmp_path)!r} + "/net.npumod")
        over, threads = in_threads(lambda: (compiled(x), loaded(x)))
        def check():
            with torch.no_grad():
                return all(np.allclose(np.asarray(run(y)), wanted.numpy(), atol=1e-4) for run in (compiled, loaded))
        print([outcome(check) for _ in range(5)])
        over.set()
        for thread in threads:
            thread.join()
        print(check())
        """
    )
    assert printed.splitlines() == ["[0, 0, 0, 0, 0]", "True"]


@pytest.mark.slow
def test_a_child_that_was_forked_amid_a_long_call_refuses_the_device() -> None:
    printed = run(
        """
        from npu_runtime import forks
        forks._PATIENCE = 0.2
        compiled = npu_sim.compile(module, (x,))
        held, over = threading.Event(), threading.Event()
        def hold():
            with compiled.backend.lock:
                held.set()
                over.wait()
        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        def check():
            try:
                compiled(y)
            except DeviceError as error:
                return "forked while another thread was in a call" in str(error) and outcome(lambda: True) == 0
        print(outcome(check))
        over.set()
        thread.join()
        print(outcome(lambda: compiled(y) is not None))
        """
    )
    assert printed.splitlines() == ["0", "0"]


@pytest.mark.slow
def test_a_child_has_threads_and_free_locks_of_its_own() -> None:
    printed = run(
        """
        from npu_runtime.forks import free_lock
        from npu_runtime.pieces import in_pieces
        lock = free_lock()
        total = lambda: sum(in_pieces(lambda part: part.stop - part.start, 1000, 10))
        assert total() == 1000
        lock.acquire()
        def check():
            with lock:
                return total() == 1000
        print(outcome(check))
        assert lock.locked()
        with npu_sim.compile(module, (x,)).backend.lock:
            print(outcome(check))
        """
    )
    assert printed.splitlines() == ["0", "0"]
