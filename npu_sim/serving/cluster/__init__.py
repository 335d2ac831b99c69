"""Replicas of a model on a Ray cluster, behind one HTTP server. Needs the extra `ray`."""

from npu_sim.serving.cluster.application import Deployment, Scale
from npu_sim.serving.cluster.engine import RemoteEngine
from npu_sim.serving.cluster.lifetime import cluster

__all__ = ["Deployment", "RemoteEngine", "Scale", "cluster"]
