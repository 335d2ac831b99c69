"""`Workers`: threads for work that would block the event loop: tokenizing long prompts, building grammars."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from npu_compiler.errors import InputError
from npu_sim.serving.http.errors import APIError

Result = TypeVar("Result")


class Workers:
    """A few threads that the routes of one event loop share."""

    def __init__(self) -> None:
        self._workers = ThreadPoolExecutor(2, "http-worker")

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """Run `work` in another thread and return its result. An `InputError` becomes an `APIError` (400)."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._workers, work)
        except InputError as error:
            raise APIError(400, str(error)) from error
        except RecursionError:
            raise APIError(400, "a JSON schema in the request is nested too deep") from None

    def close(self) -> None:
        """End the threads."""
        self._workers.shutdown(wait=False)
