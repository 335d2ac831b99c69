"""`Replica`: an actor of Ray Serve that runs one of several engines."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import replace

from npu_compiler.errors import DeviceError, NPUError
from npu_runtime import Device
from npu_sim.llm import load_checkpoint
from npu_sim.serving.cluster.messages import Output, RemoteRequest, ReplicaFacts, ReplicaStats
from npu_sim.serving.cluster.ranks import BundleWorker
from npu_sim.serving.engine_setup import (
    ReplicaSettings,
    check_same_tokens,
    most_tokens,
    open_drafts,
    open_model,
    prepare_steps,
    start_engine,
)
from npu_sim.serving.http.text import ModelText
from npu_sim.serving.request import Update, Usage


class Replica:
    """Opens the model and serves requests until Ray Serve stops the actor, after running requests have ended."""

    def __init__(self, settings: ReplicaSettings, key: str) -> None:
        formats, adapters = (settings.quantization, settings.activations), dict(settings.adapters)
        checkpoint = load_checkpoint(
            settings.model, settings.dtype, *formats, adapter=settings.adapter, adapters=adapters
        )
        device = Device(settings.device)
        if not settings.tune:
            from npu_runtime import CPUBackend

            device.backend = CPUBackend(tune=False)
        self._model = model = open_model(checkpoint, device, settings.engine, start_worker=BundleWorker)
        prepare_steps(model, lambda done, total: None)
        self._drafts = None
        if settings.draft is not None:
            small = load_checkpoint(settings.draft, settings.dtype)
            check_same_tokens(small, checkpoint)
            self._drafts = open_drafts(small, model)
            prepare_steps(self._drafts, lambda done, total: None)
        self._text = ModelText(checkpoint)
        self._facts = ReplicaFacts(most_tokens(model), f"{device.name} ({device.backend.device})", key)
        self._engine = start_engine(model, settings.engine, self._drafts)

    async def generate(self, asked: RemoteRequest) -> AsyncIterator[Output]:
        """Yield the updates of a request. Ending the iteration early cancels the request."""
        request = asked.request
        try:
            if asked.rules is not None:
                request = replace(request, token_filter=self._text.grammars.filter(asked.rules))
            handle = self._engine.submit(request)
        except NPUError as error:
            yield Output(Update(finish_reason="error", error=str(error)), Usage(len(request.prompt), 0, 0))
            return
        try:
            async for update in handle:
                yield Output(update, handle.usage)
        finally:
            handle.cancel()

    def facts(self) -> ReplicaFacts:
        return self._facts

    def stats(self) -> ReplicaStats:
        from ray import serve

        return ReplicaStats(serve.get_replica_context().replica_id.unique_id, os.getpid(), self._engine.stats())

    def check_health(self) -> None:
        """Raise an error if the engine has failed, so that Ray Serve replaces the replica."""
        self._model.check()
        if self._engine.failed:
            raise DeviceError(self._engine.failed)

    def __del__(self) -> None:
        if engine := getattr(self, "_engine", None):
            engine.close()
        for model in (getattr(self, "_drafts", None), getattr(self, "_model", None)):
            if model is not None:
                model.close()
