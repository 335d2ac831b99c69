"""The HTTP server: OpenAI's API, answered by an engine. Needs the extra `serve`."""

from npu_sim.serving.http.app import Application, make_application, make_encoder_application
from npu_sim.serving.http.encoders import ServedEncoder
from npu_sim.serving.http.keys import APIKeys, read_keys
from npu_sim.serving.http.limits import Limits
from npu_sim.serving.http.server import allow_connections, listen, run_server
from npu_sim.serving.http.service import ServedModel
from npu_sim.serving.http.text import ModelText

__all__ = [
    "APIKeys",
    "Application",
    "Limits",
    "ModelText",
    "ServedEncoder",
    "ServedModel",
    "allow_connections",
    "listen",
    "make_application",
    "make_encoder_application",
    "read_keys",
    "run_server",
]
